"""What all tables need before their rows are read: is it text, and which columns hold images and captions?"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from neuclip.data.sample import shorten
from neuclip.distributed.collectives import is_main
from neuclip.errors import UserError

IMAGE_COLUMNS = (
    "image", "image_path", "filepath", "file_path", "filename", "file_name", "path", "file", "img", "picture",
    "image_bytes", "jpg", "jpeg", "png", "webp",
)  # fmt: skip
URL_COLUMNS = frozenset({"url", "image_url", "img_url", "picture_url", "urls"})
CAPTION_COLUMNS = ("caption", "title", "text", "description", "sentence", "alt_text", "captions", "sentences", "txt")
FIRST_LINE_BYTES = 1 << 16


class ColumnChoice(NamedTuple):
    """The columns that the user names; "" where none."""

    image: str = ""
    caption: str = ""  # several between commas are several captions per image
    section: str = "data"  # of the settings in which the user names them


class Columns(NamedTuple):
    image: str
    captions: tuple[str, ...]


def choose_columns(path: Path, names: Sequence[str], choice: ColumnChoice, how: str = "") -> Columns:
    """The columns that the user names, else those with usual names, which are then printed.

    `how` is what else was found out about the file, such as "split at commas".
    """
    image = _find_columns(path, names, choice.image, IMAGE_COLUMNS, "image")
    captions = _find_columns(path, names, choice.caption, CAPTION_COLUMNS, "caption")
    if choice.image and len(image) > 1:
        raise UserError(f"{path}: --data.image_column names {len(image)} columns; give one, captions may be several")
    if not (choice.image and choice.caption):
        print_once(
            f"{path}: {how}{', ' if how else ''}images from column {image[0]!r}, captions from "
            f"{', '.join(map(repr, captions))}; name others with --{choice.section}.image_column and "
            f"--{choice.section}.caption_column"
        )
    return Columns(image[0], tuple(captions))


def _find_columns(path: Path, names: Sequence[str], choice: str, usual: tuple[str, ...], what: str) -> list[str]:
    # pandas writes its index as a column without a name: an empty choice does not mean that one.
    parts = [name for name in (part.strip() for part in choice.split(",")) if name]
    chosen = [choice] if choice and choice in names else parts
    for name in chosen:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"give one of these with --data.{what}_column"
            raise UserError(f"{path}: has no column {name!r}; its columns are {_join(names)}; {hint}")
    return chosen or _find_usual(path, names, usual, what)


def _find_usual(path: Path, names: Sequence[str], usual: tuple[str, ...], what: str) -> list[str]:
    """The first column with a usual name, or all of a numbered family: caption_1, caption_2."""
    lower = [name.lower() for name in names]
    for candidate in usual:
        if candidate in lower:
            return [names[lower.index(candidate)]]
    for candidate in usual:
        family = [name for name in names if re.fullmatch(rf"{candidate}[_ ]?\d+", name.lower())]
        if family:
            return sorted(family, key=lambda name: int(re.search(r"\d+$", name)[0]))  # type: ignore[index]
    if what == "image" and URL_COLUMNS & set(lower):
        message = images_are_urls(path, f" (its columns are {_join(names)})")
        raise UserError(f"{message}, or name a column of paths with --data.image_column")
    raise UserError(
        f"{path}: no column looks like the {what}; its columns are {_join(names)}; name it with --data.{what}_column"
    )


def _join(names: Sequence[str]) -> str:
    return shorten(", ".join(shorten(name, 60) for name in names), 400) or "none"


@cache
def print_once(line: str) -> None:
    """One line on stderr, from the main rank, and only once however often a source is opened."""
    if is_main():
        print(line, file=sys.stderr)


def is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


def images_are_urls(path: Path, evidence: str = "") -> str:
    return f"{path}: its images are URLs{evidence}; fetch them first with img2dataset (docs/data.md)"


def first_line(path: Path) -> bytes:
    """As it is, without the mark in front of UTF-8."""
    with path.open("rb") as file:
        return file.readline(FIRST_LINE_BYTES).removeprefix(codecs.BOM_UTF8)


def refuse_no_text(path: Path, first: bytes) -> None:
    """Only the first line is looked at: a NUL byte further down spoils its own row and no other."""
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path}: is UTF-16; save it as UTF-8")
    if b"\0" in first:
        raise UserError(f"{path}: its first line holds NUL bytes, which no table has; save it as text in UTF-8")


@contextlib.contextmanager
def refuse_unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


def read_json_file(path: Path, remedy: str) -> dict[str, Any]:
    """The object that a JSON file holds, empty if it holds something else; `remedy` for a damaged one."""
    with refuse_unreadable(path):
        content = path.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not a JSON file ({error}); {remedy}") from error
    return value if isinstance(value, dict) else {}
