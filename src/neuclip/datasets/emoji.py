"""Names, groups and keywords of the emoji: a small table in the package, made by scripts/make_emoji_table.py.

Its data derive from Unicode CLDR (Unicode-3.0) by way of emojibase (MIT).
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

EMOJI_PRESENTATION = "FE0F"  # asks for the colourful form; vendors disagree on writing it into file names


@dataclass(frozen=True)
class Emoji:
    """One row of the table."""

    characters: str  # as shown, with every FE0F that Unicode wants: fonts need them to join a sequence
    name: str
    group: str
    subgroup: str
    tags: tuple[str, ...]

    @property
    def hex(self) -> str:
        return hex_key("-".join(f"{ord(character):04X}" for character in self.characters))


def hex_key(code_points: str) -> str:
    """Code points in one spelling for all vendors: upper case, FE0F left out.

    >>> hex_key("2764-fe0f-200d-1f525")
    '2764-200D-1F525'
    """
    return "-".join(point for point in code_points.upper().split("-") if point != EMOJI_PRESENTATION)


def read_emoji_table() -> list[Emoji]:
    """All base emoji (no skin tones, no components), in Unicode's order."""
    text = gzip.decompress(files("neuclip.datasets").joinpath("emoji_table.tsv.gz").read_bytes()).decode("utf-8")
    rows = (line.split("\t") for line in text.splitlines()[1:])
    return [
        Emoji("".join(chr(int(point, 16)) for point in points.split("-")), name, group, subgroup, _split_tags(tags))
        for points, name, group, subgroup, tags in rows
    ]


@cache
def emoji_by_hex() -> dict[str, Emoji]:
    return {emoji.hex: emoji for emoji in read_emoji_table()}


def _split_tags(tags: str) -> tuple[str, ...]:
    return tuple(tags.split("|")) if tags else ()
