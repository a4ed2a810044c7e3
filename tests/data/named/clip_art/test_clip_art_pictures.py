from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from neuclip.data.named.clip_art.picture import SIDE, make_picture
from neuclip.data.named.clip_art.pieces import BLANK, UNREADABLE, draw_one

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">{body}</svg>'
RED = (255, 0, 0)


@pytest.fixture
def pixels_of(tmp_path):
    def drawn(name: str, content: bytes | str) -> np.ndarray:
        file = tmp_path / name
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        picture = make_picture(file)
        assert picture is not None
        image = Image.open(io.BytesIO(picture.content))
        assert image.mode == "RGB"
        return np.asarray(image)

    return drawn


def box_of(pixels: np.ndarray, colour: tuple[int, int, int]) -> tuple[int, int]:
    """Width and height of what has the colour."""
    rows, columns = np.nonzero((pixels == colour).all(axis=-1))
    return int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1


def test_what_is_transparent_becomes_white_whatever_colour_lies_under_it(pixels_of):
    image = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (10, 10, 30, 30))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    pixels = pixels_of("stamp.png", buffer.getvalue())
    assert box_of(pixels, RED) == (20, 20)
    assert set(map(tuple, pixels.reshape(-1, 3).tolist())) == {RED, (255, 255, 255)}


@pytest.mark.parametrize("size", [(30, 10), (10, 30), (880, 220)])
def test_a_picture_stands_in_a_square_with_its_shape_kept(pixels_of, encoded, size):
    pixels = pixels_of("pencil.png", encoded("PNG", size, "red"))
    assert pixels.shape[0] == pixels.shape[1] <= SIDE
    width, height = box_of(pixels, RED)
    assert width / height == pytest.approx(size[0] / size[1], rel=0.05)
    assert width == min(size[0], 220) or height == min(size[1], 220)


def test_a_square_jpeg_keeps_its_bytes_and_another_is_squared(tmp_path, encoded):
    square, wide = tmp_path / "square.jpg", tmp_path / "wide.jpg"
    square.write_bytes(encoded("JPEG", (200, 200), "red"))
    wide.write_bytes(encoded("JPEG", (200, 100), "red"))
    kept, made = make_picture(square), make_picture(wide)
    assert kept is not None and (kept.extension, kept.content) == ("jpg", square.read_bytes())
    assert made is not None and made.extension == "png"
    assert Image.open(io.BytesIO(made.content)).size == (204, 204)


@pytest.mark.parametrize("unit", ["", "pt", "mm"])
def test_a_small_drawing_on_a_large_page_fills_the_picture(pixels_of, unit):
    body = '<rect x="10" y="700" width="200" height="100" fill="red"/>'
    page = f'<svg xmlns="http://www.w3.org/2000/svg" width="600{unit}" height="800{unit}" viewBox="0 0 600 800">'
    pixels = pixels_of("page.svg", f"{page}{body}</svg>")
    width, height = box_of(pixels, RED)
    assert 200 <= width <= 220 and 2 * height == pytest.approx(width, abs=4)


def test_a_flag_keeps_its_white_stripes(pixels_of):
    body = '<rect width="90" height="60" fill="white"/><rect x="30" width="30" height="60" fill="red"/>'
    pixels = pixels_of("flag.svg", SVG.format(width=90, height=60, body=body))
    width, height = box_of(pixels, RED)
    assert width == pytest.approx(SIDE / 3, abs=3) and height == pytest.approx(2 * width, abs=3)


def test_blank_and_broken_files_are_told_apart(tmp_path, encoded):
    broken, white, nothing = tmp_path / "broken.png", tmp_path / "white.png", tmp_path / "nothing.svg"
    broken.write_bytes(encoded("PNG", (9, 9), "red")[:50])
    white.write_bytes(encoded("PNG", (9, 9), "white"))
    nothing.write_text(SVG.format(width=9, height=9, body=""))
    wrong = tmp_path / "wrong.svg"
    wrong.write_text("no drawing")
    assert [draw_one(file) for file in (broken, white, nothing, wrong)] == [UNREADABLE, BLANK, BLANK, UNREADABLE]


def test_a_drawing_that_resvg_stumbles_over_is_left_out(monkeypatch, tmp_path, drawing):
    class PanicException(BaseException):
        """As pyo3 makes it: no Exception."""

    def stumble(**_):
        raise PanicException("index out of bounds")

    monkeypatch.setattr("resvg_py.svg_to_bytes", stumble)
    (tmp_path / "a.svg").write_bytes(drawing())
    assert draw_one(tmp_path / "a.svg") == UNREADABLE
