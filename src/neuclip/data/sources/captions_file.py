"""One file with the captions of a whole folder of pictures: captions.csv, .tsv, .jsonl or .txt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from neuclip.data.sample import Fault, Lost, shortened
from neuclip.data.sources.columns import CAPTION_COLUMNS, IMAGE_COLUMNS, Asked, say
from neuclip.data.sources.csv import SEPARATORS, read_csv
from neuclip.data.sources.jsonl import read_jsonl
from neuclip.data.sources.listed import Row
from neuclip.errors import AskedWrongly

NAMES = ("captions.csv", "captions.tsv", "captions.jsonl", "captions.txt", "metadata.csv", "metadata.jsonl")
NUMBERED = re.compile(r"#\d+$")  # Flickr's lists name the captions of a picture a.jpg#0, a.jpg#1


def captions_file_in(folder: Path) -> Path | None:
    """The captions file of a folder, None if there is none. Two are one too many: which of them holds?"""
    found = [folder / name for name in NAMES if (folder / name).is_file()]
    if len(found) > 1:
        raise AskedWrongly(f"{folder}: has {found[0].name} and {found[1].name}; keep one of them in the folder")
    return found[0] if found else None


def captions_by_picture(
    path: Path, pictures: list[str], asked: Asked
) -> tuple[dict[str, list[bytes]], tuple[Fault, ...]]:
    """Captions of each picture (paths from the folder), those of several rows together; and the rows of no use.

    A row names its picture by its path from the folder, or by its file name where only one picture is called so.
    """
    by_name: dict[str, str] = {}
    for picture in pictures:
        name = picture.rpartition("/")[2]
        by_name[name] = "" if name in by_name else picture
    known = set(pictures)
    found: dict[str, list[bytes]] = {}
    unmatched = Lost()
    for number, row in enumerate(_rows(path, known | by_name.keys(), asked), start=1):
        name = row.image.decode(errors="surrogateescape").replace("\\", "/").removeprefix("./")
        picture = name if name in known else by_name.get(name, "")
        if picture and row.reason:
            found.setdefault(picture, [])
            unmatched.note(row.reason, f"{path} row {number}: {name}")
        elif picture:
            found.setdefault(picture, []).extend(row.captions)
        else:
            unmatched.note("no picture", f"{path} row {number}: {shortened(name) or row.reason}")
    faults = unmatched.faults()
    if not found:
        first = faults[0].where.removeprefix(f"{path} row 1: ") if faults else "nothing"
        raise AskedWrongly(
            f"{path}: names none of the {len(pictures):,} pictures beside it; its first row leads to {first}, "
            f"the first picture is {pictures[0]}; give paths from the folder"
        )
    return found, faults


def _rows(path: Path, known: set[str], asked: Asked) -> Iterator[Row]:
    if path.suffix == ".jsonl":
        return iter(read_jsonl(path, asked))
    if path.suffix != ".txt" or _has_header(path, asked):
        return iter(read_csv(path, asked))
    return _lines(path, known)


def _has_header(path: Path, asked: Asked) -> bool:
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        first = file.readline(1 << 16).strip().lower()
    wanted = ({asked.image.lower()} if asked.image else set()) | set(IMAGE_COLUMNS)
    captions = ({asked.caption.lower()} if asked.caption else set()) | set(CAPTION_COLUMNS)
    fields = [{field.strip().strip('"') for field in first.split(separator)} for separator in SEPARATORS]
    return any(cut & wanted and cut & captions for cut in fields)


def _lines(path: Path, known: set[str]) -> Iterator[Row]:
    """`name, separator, caption` without a header: the separator is what ends a picture's name in the first line."""
    with path.open("rb") as file:
        separator = _separator(path, file.readline(1 << 16).removeprefix(b"\xef\xbb\xbf"), known)
        file.seek(0)
        for line in file:
            name, _, caption = line.removeprefix(b"\xef\xbb\xbf").strip().partition(separator)
            if name or caption:
                yield Row(_picture_name(name).encode(errors="surrogateescape"), (caption.strip(),))


def _separator(path: Path, first: bytes, known: set[str]) -> bytes:
    for separator in ("\t", ",", ";", "|", " "):
        name, found, _ = first.partition(separator.encode())
        if found and _picture_name(name) in known:
            say(f"{path}: no header, split at the first {SEPARATORS.get(separator, 'blanks')[:-1]} of each line")
            return separator.encode()
    raise AskedWrongly(
        f"{path}: its first line does not begin with the name of a picture beside it; "
        "give lines of name, tab, caption, or a table with the columns image and caption"
    )


def _picture_name(name: bytes) -> str:
    return NUMBERED.sub("", name.decode(errors="surrogateescape").strip())
