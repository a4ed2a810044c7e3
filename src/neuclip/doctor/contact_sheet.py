"""Images to look at: a contact sheet as a file, and a strip of images in a terminal with colours."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import TextIO

from PIL import Image, ImageDraw, ImageFont

from neuclip.doctor.probe import THUMBNAIL, ShownPair

ACROSS = 6
MARGIN = 8
TEXT_HEIGHT = 30  # two lines
FONT_SIZE = 11
LETTERS = 20  # that fit below a thumbnail
CELL = 16  # columns of an image in the terminal; 8 lines: a character is two pixels high


def contact_sheet(shown: Sequence[ShownPair]) -> Image.Image:
    """Thumbnails in rows, the beginning of its caption below each."""
    rows = -(-len(shown) // ACROSS)
    width, height = THUMBNAIL + MARGIN, THUMBNAIL + TEXT_HEIGHT + MARGIN
    sheet = Image.new("RGB", (ACROSS * width + MARGIN, rows * height + MARGIN), "#f4f4f4")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_SIZE)
    for number, one in enumerate(shown):
        left, top = MARGIN + number % ACROSS * width, MARGIN + number // ACROSS * height
        sheet.paste(one.thumbnail, (left, top + THUMBNAIL - one.thumbnail.height))
        lines = textwrap.wrap(one.caption, LETTERS, max_lines=2, placeholder=" ...")
        draw.multiline_text((left, top + THUMBNAIL + 2), "\n".join(lines), fill="black", font=font, spacing=2)
    return sheet


def draws_images(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this is a terminal with 24-bit colours, and the user has not set NO_COLOR."""
    by_name = environment.get("TERM", "").endswith("-direct")
    colours = by_name or environment.get("COLORTERM", "") in ("truecolor", "24bit")
    unicode = "utf" in (stream.encoding or "").lower()
    return stream.isatty() and colours and unicode and "NO_COLOR" not in environment


def strip(shown: Sequence[ShownPair], columns: int) -> str:
    """As many images side by side as fit into `columns`, each in 16 columns and 8 lines."""
    fitting = shown[: max(1, columns // (CELL + 1))]
    canvas = Image.new("RGB", (len(fitting) * (CELL + 1), CELL), "black")
    for number, one in enumerate(fitting):
        small = one.thumbnail.copy()
        small.thumbnail((CELL, CELL))
        canvas.paste(small, (number * (CELL + 1), 0))
    return half_blocks(canvas)


def half_blocks(image: Image.Image) -> str:
    """Two pixels per character: an upper half block in the upper pixel's colour on the lower pixel's colour.

    >>> half_blocks(Image.new("RGB", (1, 2), "red"))
    '\\x1b[38;2;255;0;0;48;2;255;0;0m▀\\x1b[0m\\n'
    """
    pixels = image.convert("RGB").load()
    assert pixels is not None
    text = ""
    for y in range(0, image.height - 1, 2):
        for x in range(image.width):
            upper, lower = (";".join(map(str, pixels[x, y + below])) for below in (0, 1))  # type: ignore[arg-type]
            text += f"\x1b[38;2;{upper};48;2;{lower}m▀"
        text += "\x1b[0m\n"
    return text
