"""Images for eyes: the contact sheet, and half blocks in a terminal."""

from __future__ import annotations

import io

from PIL import Image

from neuclip.doctor.contact_sheet import contact_sheet, draws_images, half_blocks, strip
from neuclip.doctor.probe import ShownPair


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def shown(colour: str) -> ShownPair:
    return ShownPair(
        0, (64, 32), Image.new("RGB", (128, 64), colour), "a caption that is longer than one line of it" * 3
    )


def test_a_character_carries_the_colours_of_two_pixels():
    image = Image.new("RGB", (1, 2), "red")
    image.putpixel((0, 1), (0, 0, 255))
    assert half_blocks(image) == "\x1b[38;2;255;0;0;48;2;0;0;255m▀\x1b[0m\n"


def test_a_strip_is_no_wider_than_the_terminal_and_eight_lines_high():
    lines = strip([shown("red")] * 10, columns=80).splitlines()
    assert len(lines) == 8 and all(line.count("▀") == 4 * 17 for line in lines)
    assert strip([shown("red")], columns=5).count("\n") == 8


def test_only_a_terminal_with_colours_gets_images():
    colours = {"COLORTERM": "truecolor"}
    assert draws_images(Terminal(), colours)
    assert not draws_images(io.StringIO(), colours)
    assert not draws_images(Terminal(), {"TERM": "xterm"})
    assert not draws_images(Terminal(), {**colours, "NO_COLOR": "1"})


def test_the_sheet_shows_every_image_in_its_place():
    sheet = contact_sheet([shown(colour) for colour in ("red", "lime", "blue", "white", "black", "red", "lime")])
    assert sheet.getpixel((20, 130)) == (255, 0, 0) and sheet.getpixel((160, 130)) == (0, 255, 0)
    assert sheet.getpixel((20, 130 + 166)) == (0, 255, 0)  # the seventh begins the second row
