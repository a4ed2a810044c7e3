"""Draws SVG documents and font glyphs as 64 x 64 RGB images on white, with a margin of 2 pixels.

Images are drawn at their final size, which is sharper and faster than shrinking. The background is white, because most
image transforms turn transparent pixels black, and black line drawings would vanish.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import numpy as np
from PIL import Image

from neuclip.machine import available_cores

SIZE = 64
MARGIN = 2
GREY_SIDE = 24
# At this size the widest glyphs of both Noto fonts (flags) are 60 pixels wide and all are centred on this baseline.
GLYPH_SIZE = 48.0
GLYPH_BASELINE = 48.6
UNASSIGNED = "\U0010ffff"  # never a character, so that a font draws its sign for a missing glyph
ROOT_TAG = re.compile(r"<svg\b[^>]*>")
VIEW_BOX = re.compile(r"\bviewBox\s*=\s*[\"']([^\"']*)[\"']")
FRAME = re.compile(r"\s(?:width|height|viewBox|preserveAspectRatio)\s*=\s*(?:\"[^\"]*\"|'[^']*')")
MOST_PROCESSES = 8  # each costs half a second to start, and a build takes a minute on two
CHUNK = 64  # drawings that a process gets at a time


@dataclass(frozen=True)
class Glyph:
    """Characters that one font draws as a single image."""

    characters: str
    font_file: str
    font_family: str


Art = str | Glyph  # an SVG document, or a glyph


class Drawn(NamedTuple):
    """A drawn image without its pixels: 30,000 of them take 60 MB."""

    png: bytes
    digest: bytes  # of the pixels
    grey: bytes  # 24 x 24, 255 for black and 0 for white, to find near duplicates


def draw_all(art: Sequence[Art]) -> Iterator[Drawn | None]:
    """Draw everything, in order. Uses processes instead of threads, because resvg holds the interpreter's lock."""
    with ProcessPoolExecutor(min(MOST_PROCESSES, available_cores()), initializer=_hide_panics) as pool:
        yield from pool.map(draw, art, chunksize=CHUNK)


def _hide_panics() -> None:
    """Silence stderr: resvg prints every panic, although `rasterise` catches it and the image is skipped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def draw(art: Art) -> Drawn | None:
    """Draw one image. Returns None if it would be blank, or if the document cannot be drawn."""
    try:
        pixels = draw_glyph(art) if isinstance(art, Glyph) else draw_svg(art)
    except ValueError:  # what resvg and draw_svg raise for a document they cannot read
        return None
    if pixels is None or not (pixels < 255).any():
        return None
    image = Image.fromarray(pixels)
    grey = image.convert("L").resize((GREY_SIDE, GREY_SIDE), Image.Resampling.BOX)
    digest = hashlib.sha256(pixels.tobytes()).digest()
    return Drawn(encode_png(image), digest, (255 - np.asarray(grey)).tobytes())


def encode_png(image: Image.Image) -> bytes:
    """PNG without metadata: the same pixels give the same bytes."""
    file = io.BytesIO()
    image.save(file, "PNG", optimize=False, compress_level=6)
    return file.getvalue()


def draw_svg(text: str) -> np.ndarray:  # -> (64, 64, 3) uint8
    """Draw a document centred, with its longer side 60 pixels, and `currentColor` as black."""
    root = ROOT_TAG.search(text)
    view_box = VIEW_BOX.search(root.group(0)) if root else None
    if root is None or view_box is None:
        raise ValueError("an SVG document without a view box")
    left, top, width, height = (float(number) for number in view_box.group(1).replace(",", " ").split())
    # The view box is enlarged by the margin, so that the drawing itself need not be moved.
    side = max(width, height) * SIZE / (SIZE - 2 * MARGIN)
    frame = f"{left - (side - width) / 2:.6f} {top - (side - height) / 2:.6f} {side:.6f} {side:.6f}"
    opening = FRAME.sub("", root.group(0)).replace("<svg", f'<svg width="{SIZE}" height="{SIZE}" viewBox="{frame}"', 1)
    text = text[: root.start()] + opening + text[root.end() :]
    return rasterise(text.replace("currentColor", "#000"))


def draw_glyph(glyph: Glyph) -> np.ndarray | None:  # -> (64, 64, 3) uint8
    """Draw a glyph. Returns None if the font has no glyph for the characters, or draws them side by side."""
    pixels = _draw_wide(glyph)
    middle = pixels[:, SIZE // 2 : -SIZE // 2]
    if (pixels < 255).sum() > (middle < 255).sum():
        return None
    return None if np.array_equal(middle, _missing_glyph(glyph.font_file, glyph.font_family)) else middle


@cache
def _missing_glyph(font_file: str, font_family: str) -> np.ndarray:
    """The font's sign for an unknown character."""
    return _draw_wide(Glyph(UNASSIGNED, font_file, font_family))[:, SIZE // 2 : -SIZE // 2]


def _draw_wide(glyph: Glyph) -> np.ndarray:  # -> (64, 128, 3) uint8
    """Draw on a canvas of double width, where characters that the font cannot join extend beyond the centre."""
    return rasterise(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * SIZE}" height="{SIZE}">'
        f'<text x="{SIZE}" y="{GLYPH_BASELINE}" font-size="{GLYPH_SIZE}" font-family="{glyph.font_family}" '
        f'text-anchor="middle">{escape(glyph.characters)}</text></svg>',
        font_files=[glyph.font_file],
    )


def rasterise(svg: str, **options: Any) -> np.ndarray:  # -> (height, width, 3) uint8
    """Rasterise a document without the fonts of the machine, on which images must not depend. Raises ValueError if
    resvg cannot draw it."""
    import resvg_py  # installed with the extra `demo`

    try:
        png = resvg_py.svg_to_bytes(svg_string=svg, background="white", skip_system_fonts=True, **options)
    except BaseException as problem:
        # A bug in resvg (a Rust panic) raises a BaseException whose class cannot be imported.
        if type(problem).__name__ != "PanicException":
            raise
        raise ValueError(f"resvg cannot draw this document: {problem}") from problem
    return np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGB"))
