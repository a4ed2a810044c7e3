"""Drawing: SVG documents and font glyphs to 64 x 64 RGB on white, with a margin of 2 pixels.

Everything is drawn at its final size: sharper and faster than shrinking. White, because transparent pixels turn black
in most image transforms, where black line drawings vanish.
"""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np
from PIL import Image

from neuclip.datasets.near_duplicates import thumbnail
from neuclip.datasets.rasteriser import svg_to_png

SIZE = 64
MARGIN = 2
# At this size the widest glyphs of both Noto fonts (flags) are 60 pixels wide and all are centred on this baseline.
GLYPH_SIZE = 48.0
GLYPH_BASELINE = 48.6
UNASSIGNED = "\U0010ffff"  # never a character: a font draws its sign for "I have no such glyph"
ROOT_TAG = re.compile(r"<svg\b[^>]*>")
VIEW_BOX = re.compile(r"\bviewBox\s*=\s*[\"']([^\"']*)[\"']")
FRAME = re.compile(r"\s(?:width|height|viewBox|preserveAspectRatio)\s*=\s*(?:\"[^\"]*\"|'[^']*')")


@dataclass(frozen=True)
class Glyph:
    """Characters that one font draws as a single image."""

    characters: str
    font_file: str
    font_family: str


Drawable = str | Glyph  # an SVG document, or a glyph


class Drawn(NamedTuple):
    """A drawn image, without its pixels: 30,000 of them fit well into memory."""

    png: bytes
    digest: bytes  # of the pixels
    thumbnail: tuple[bytes, bytes]


def draw_one(image: Drawable) -> Drawn | None:
    """None when there is nothing to see, or the document cannot be drawn."""
    try:
        pixels = draw(image)
    except ValueError:  # what resvg and draw_svg raise for a document they cannot read
        return None
    if pixels is None:
        return None
    return Drawn(encode_png(pixels), hashlib.sha256(pixels.tobytes()).digest(), thumbnail(pixels))


def encode_png(pixels: np.ndarray) -> bytes:
    """PNG without metadata: the same pixels give the same bytes."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=False, compress_level=6)
    return buffer.getvalue()


def draw(image: Drawable) -> np.ndarray | None:
    """uint8 array (64, 64, 3); None when there is nothing to see."""
    pixels = draw_glyph(image) if isinstance(image, Glyph) else draw_svg(image)
    return pixels if pixels is not None and (pixels < 255).any() else None


def draw_svg(text: str) -> np.ndarray:
    """Draw a document centred, its longer side 60 pixels, what takes the text's colour in black."""
    root = ROOT_TAG.search(text)
    view_box = VIEW_BOX.search(root.group(0)) if root else None
    if root is None or view_box is None:
        raise ValueError("an SVG document without a view box")
    left, top, width, height = (float(number) for number in view_box.group(1).replace(",", " ").split())
    # The view box grows by the margin: nothing has to be wrapped or moved.
    side = max(width, height) * SIZE / (SIZE - 2 * MARGIN)
    frame = f"{left - (side - width) / 2:.6f} {top - (side - height) / 2:.6f} {side:.6f} {side:.6f}"
    opening = FRAME.sub("", root.group(0)).replace("<svg", f'<svg width="{SIZE}" height="{SIZE}" viewBox="{frame}"', 1)
    text = text[: root.start()] + opening + text[root.end() :]
    return _pixels(text.replace("currentColor", "#000"))


def draw_glyph(glyph: Glyph) -> np.ndarray | None:
    """Draw characters as one glyph; None when the font has no glyph for them, or draws them side by side."""
    pixels = _draw_wide(glyph)
    middle = pixels[:, SIZE // 2 : -SIZE // 2]
    if (pixels < 255).sum() > (middle < 255).sum():
        return None
    missing = _missing_glyph(glyph.font_file, glyph.font_family)
    return None if np.array_equal(middle, missing) else middle


@cache
def _missing_glyph(font_file: str, font_family: str) -> np.ndarray:
    """The font's sign for an unknown character."""
    return _draw_wide(Glyph(UNASSIGNED, font_file, font_family))[:, SIZE // 2 : -SIZE // 2]


def _draw_wide(glyph: Glyph) -> np.ndarray:
    """On a canvas of double width: what a font cannot join into one glyph sticks out of the middle."""
    return _pixels(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * SIZE}" height="{SIZE}">'
        f'<text x="{SIZE}" y="{GLYPH_BASELINE}" font-size="{GLYPH_SIZE}" font-family="{glyph.font_family}" '
        f'text-anchor="middle">{escape(glyph.characters)}</text></svg>',
        [glyph.font_file],
    )


def _pixels(svg: str, font_files: list[str] | None = None) -> np.ndarray:
    png = svg_to_png(svg_string=svg, background="white", font_files=font_files)
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
