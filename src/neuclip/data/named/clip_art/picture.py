"""Pictures as they go into the shards: squares on white, of 224 pixels at most, without metadata."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from neuclip.data.named.icons.rasteriser import svg_to_png
from neuclip.data.named.icons.twins import thumbnail
from neuclip.data.named.png import encode_png

SIDE = 224  # what the usual CLIP models look at (ViT-B-32, ViT-B-16, RN50); more pixels would only cost disk
MARGIN = 2
INNER = SIDE - 2 * MARGIN
SMALL = 160  # a drawing that is smaller on its page is drawn again, larger
LARGEST_PAGE = 8 * SIDE


class Picture(NamedTuple):
    """A picture without its pixels: thousands of them fit into memory."""

    extension: str
    content: bytes
    digest: bytes  # of the pixels
    thumbnail: tuple[bytes, bytes]


def make_picture(file: Path) -> Picture | None:
    """Draw or read a file; None when nothing is to be seen on white. ValueError or OSError: it cannot be read."""
    opened = draw_svg(file) if file.suffix == ".svg" else Image.open(file)
    if opened.format == "JPEG" and opened.mode == "RGB" and opened.width == opened.height <= SIDE:
        pixels, extension, content = np.asarray(opened), "jpg", file.read_bytes()  # encoded again it would lose
    else:
        pixels = np.asarray(squared(on_white(opened)))
        extension, content = "png", encode_png(pixels)
    if pixels.min() == 255:
        return None
    shape = repr(pixels.shape).encode()
    return Picture(extension, content, hashlib.sha256(shape + pixels.tobytes()).digest(), thumbnail(pixels))


def on_white(image: Image.Image) -> Image.Image:
    """RGB on white. Most image transforms drop the transparency, and what lies under it is mostly black."""
    coloured = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured).convert("RGB")


def squared(image: Image.Image) -> Image.Image:
    """In the middle of a white square of 224 pixels or less, its shape kept; small ones are not enlarged.

    The transforms of CLIP scale the shorter side and cut the longer one: of a pencil only the middle would be left.
    """
    image.thumbnail((INNER, INNER), Image.Resampling.BICUBIC)
    side = max(image.size) + 2 * MARGIN
    square = Image.new("RGB", (side, side), "white")
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def draw_svg(file: Path) -> Image.Image:
    """RGBA without empty margins, the longer side 160 to 220: many drawings are small in a corner of an A4 page.

    Only what is transparent is cut off: a flag keeps its white stripes.
    """
    page = _draw_page(file, INNER)
    drawn = page.getchannel("A").getbbox()
    if drawn is None:
        return page
    longest = max(drawn[2] - drawn[0], drawn[3] - drawn[1])
    if longest < SMALL:
        page = _draw_page(file, min(LARGEST_PAGE, INNER * (INNER - 1) // longest))
        drawn = page.getchannel("A").getbbox()
    return page.crop(drawn)


def _draw_page(file: Path, side: int) -> Image.Image:
    # Without dpi resvg-py refuses sizes in points and millimetres.
    png = svg_to_png(svg_path=str(file), width=side, height=side, dpi=96.0)
    return Image.open(io.BytesIO(png)).convert("RGBA")
