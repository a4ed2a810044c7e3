"""Every drawing becomes the same small picture, in whatever process; what shows nothing is left out."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from neuclip_icons.drawing import Glyph, draw, draw_all
from neuclip_icons.sources import SOURCES

pytest.importorskip("resvg_py", reason="the extra demo is not installed")

FONTS = {source.name: source for source in SOURCES if source.where.endswith(".ttf")}
SVG = '<svg xmlns="http://www.w3.org/2000/svg" {}><path fill="currentColor" d="M{} 0h{}v{}H{}z"/></svg>'


def glyph(characters: str, font: str = "noto") -> Glyph:
    path = FONTS[font].path
    if path is None:
        pytest.skip(f"{FONTS[font].package} is not installed")
    return Glyph(characters, str(path), FONTS[font].inside)


def pixels_of(art: str | Glyph) -> np.ndarray:
    drawn = draw(art)
    assert drawn is not None
    image = Image.open(io.BytesIO(drawn.png))
    assert image.mode == "RGB" and not image.info, "the file holds the pixels and nothing else"
    return np.asarray(image)


@pytest.mark.parametrize(
    ("frame", "left", "width", "height", "box"),
    [
        ('viewBox="0 0 24 24"', 0, 24, 24, (2, 2, 61, 61)),
        ('width="24" height="24"\n viewBox="0 0 24 24"', 0, 24, 24, (2, 2, 61, 61)),
        ('viewBox="6 0 12 24"', 6, 12, 24, (17, 2, 46, 61)),  # what is not square keeps its shape, in the middle
        ('viewBox="0 0 40 20"', 0, 40, 20, (2, 17, 61, 46)),
    ],
)
def test_a_drawing_fills_all_but_two_pixels_at_each_side(frame, left, width, height, box):
    pixels = pixels_of(SVG.format(frame, left, width, height, left))
    rows, columns = np.nonzero((pixels < 250).any(axis=2))
    assert pixels.shape == (64, 64, 3) and pixels.dtype == np.uint8
    assert (columns.min(), rows.min(), columns.max(), rows.max()) == box
    assert (pixels[box[1] : box[3] + 1, box[0] : box[2] + 1] == 0).all(), "currentColor is black"


@pytest.mark.parametrize("font", ["noto", "notomono"])
@pytest.mark.parametrize("characters", ["😀", "❤️", "#️⃣", "👨‍👩‍👧"])
def test_a_glyph_is_drawn_inside_white_corners(characters, font):
    pixels = pixels_of(glyph(characters, font))
    assert pixels.shape == (64, 64, 3) and (pixels < 128).sum() > 100
    assert all((pixels[y, x] == 255).all() for y in (0, -1) for x in (0, -1))


def test_a_flag_is_drawn_in_its_colours():
    france = pixels_of(glyph("🇫🇷"))
    left, right = france[32, 12].astype(int), france[32, 52].astype(int)
    assert left[2] > left[0] + 50 and right[0] > right[2] + 50


def test_blank_images_and_documents_that_cannot_be_drawn_are_skipped(monkeypatch):
    broken = ["<svg viewBox='0 0 24 24'><path", "not a drawing", '<svg xmlns="http://www.w3.org/2000/svg"/>']
    two_glyphs, no_glyph = glyph("😀😀"), glyph("\U0010fffe")
    assert [draw(one) for one in (*broken, two_glyphs, no_glyph)] == [None] * 5

    class PanicException(BaseException):
        """As pyo3 makes it: no Exception. The only known case is 55 kB of somebody's emoji."""

    def panic(**_):
        raise PanicException("index out of bounds")

    monkeypatch.setattr("resvg_py.svg_to_bytes", panic)
    assert draw('<svg viewBox="0 0 1 1"></svg>') is None


def test_child_processes_draw_the_same_bytes_in_the_same_order():
    circles = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 99 99"><circle cx="50" cy="50" r="{r}"/></svg>'
        for r in range(5, 45)
    ]
    images = [*circles, glyph("😀"), "not a drawing", glyph("🇫🇷")] * 3
    assert list(draw_all(images)) == [draw(image) for image in images]
