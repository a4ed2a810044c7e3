"""Which columns of a table hold images and captions: asked for, or found by their usual names and then said."""

from __future__ import annotations

import codecs
import difflib
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from neuclip.data.sample import shortened
from neuclip.distributed.collectives import is_main
from neuclip.errors import UserError

IMAGE_COLUMNS = (
    "image", "image_path", "filepath", "file_path", "filename", "file_name", "path", "file", "img", "picture",
    "image_bytes", "jpg", "jpeg", "png", "webp",
)  # fmt: skip
URL_COLUMNS = frozenset({"url", "image_url", "img_url", "picture_url", "urls"})
CAPTION_COLUMNS = ("caption", "title", "text", "description", "sentence", "alt_text", "captions", "sentences", "txt")


class Asked(NamedTuple):
    """What the user said about columns; "" where nothing."""

    image: str = ""
    caption: str = ""  # several between commas are several captions per image


class Columns(NamedTuple):
    image: str
    captions: tuple[str, ...]


def choose_columns(path: Path, names: Sequence[str], asked: Asked, how: str = "") -> Columns:
    """The columns asked for, or those with usual names; what was found rather than asked for is said on stderr.

    `how` is what else was found out about the file, such as "split at commas".
    """
    image = _asked(path, names, asked.image, "image") or _usual(path, names, IMAGE_COLUMNS, "image")[:1]
    captions = _asked(path, names, asked.caption, "caption") or _usual(path, names, CAPTION_COLUMNS, "caption")
    if len(image) > 1:
        raise UserError(f"{path}: --data.image_column names {len(image)} columns; give one, captions may be several")
    if not (asked.image and asked.caption):
        say(
            f"{path}: {how}{', ' if how else ''}images from column {image[0]!r}, captions from "
            f"{', '.join(map(repr, captions))}; name others with --data.image_column and --data.caption_column"
        )
    return Columns(image[0], tuple(captions))


@cache
def say(line: str) -> None:
    """One line to the user, from one process of several, and once, however often the source is opened."""
    if is_main():
        print(line, file=sys.stderr)


def is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


def refuse_no_text(path: Path, first: bytes) -> None:
    """Only the first line is looked at: a NUL byte further down spoils its own row and no other."""
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path}: is UTF-16; save it as UTF-8")
    if b"\0" in first:
        raise UserError(f"{path}: its first line holds NUL bytes, which no table has; save it as text in UTF-8")


def images_are_urls(path: Path, how: str = "") -> str:
    """The line for a table of addresses; `how` it was told."""
    return f"{path}: its images are URLs{how}; fetch them first with img2dataset (docs/data.md)"


def _asked(path: Path, names: Sequence[str], asked: str, what: str) -> list[str]:
    # A column without a name (an index, as pandas writes it) is not what nobody asked for.
    parts = [name for name in (part.strip() for part in asked.split(",")) if name]
    wanted = [asked] if asked and asked in names else parts
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"give one of these with --data.{what}_column"
            raise UserError(f"{path}: has no column {name!r}; its columns are {_listed(names)}; {hint}")
    return wanted


def _usual(path: Path, names: Sequence[str], known: tuple[str, ...], what: str) -> list[str]:
    """The first column with a usual name, or all of a numbered family: caption_1, caption_2."""
    lower = [name.lower() for name in names]
    for candidate in known:
        if candidate in lower:
            return [names[lower.index(candidate)]]
    for candidate in known:
        family = [name for name in names if re.fullmatch(rf"{candidate}[_ ]?\d+", name.lower())]
        if family:
            return sorted(family, key=lambda name: int(re.search(r"\d+$", name)[0]))  # type: ignore[index]
    if what == "image" and URL_COLUMNS & set(lower):
        told = images_are_urls(path, f" (its columns are {_listed(names)})")
        raise UserError(f"{told}, or name a column of paths with --data.image_column")
    raise UserError(
        f"{path}: no column looks like the {what}; its columns are {_listed(names)}; name it with --data.{what}_column"
    )


def _listed(names: Sequence[str]) -> str:
    return shortened(", ".join(shortened(name, 60) for name in names), 400) or "none"
