"""One file with the captions of a whole folder of images: captions.csv, .tsv, .jsonl or .txt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from neuclip.data.sample import Fault, UnindexedFaults, shortened
from neuclip.data.tables.columns import CAPTION_COLUMNS, IMAGE_COLUMNS, Asked, say
from neuclip.data.tables.csv import SEPARATORS, read_csv
from neuclip.data.tables.jsonl import read_jsonl
from neuclip.data.tables.listed import Row
from neuclip.errors import UserError

NAMES = ("captions.csv", "captions.tsv", "captions.jsonl", "captions.txt", "metadata.csv", "metadata.jsonl")
NUMBERED = re.compile(r"#\d+$")  # Flickr's lists name the captions of an image a.jpg#0, a.jpg#1


def captions_file_in(folder: Path) -> Path | None:
    """The captions file of a folder, None if there is none. Two are one too many: which of them holds?"""
    found = [folder / name for name in NAMES if (folder / name).is_file()]
    if len(found) > 1:
        raise UserError(f"{folder}: has {found[0].name} and {found[1].name}; keep one of them in the folder")
    return found[0] if found else None


def captions_by_image(path: Path, images: list[str], asked: Asked) -> tuple[dict[str, list[bytes]], tuple[Fault, ...]]:
    """Captions of each image (paths from the folder), those of several rows together; and the rows of no use.

    A row names its image by its path from the folder, or by its file name where only one image is called so.
    """
    by_name: dict[str, str] = {}
    for image in images:
        name = image.rpartition("/")[2]
        by_name[name] = "" if name in by_name else image
    known = set(images)
    found: dict[str, list[bytes]] = {}
    unmatched = UnindexedFaults()
    for number, row in enumerate(_rows(path, known | by_name.keys(), asked), start=1):
        name = row.image.decode(errors="surrogateescape").replace("\\", "/").removeprefix("./")
        image = name if name in known else by_name.get(name, "")
        if image and row.reason:
            found.setdefault(image, [])
            unmatched.note(row.reason, f"{path} row {number}: {name}")
        elif image:
            found.setdefault(image, []).extend(row.captions)
        else:
            unmatched.note("no image", f"{path} row {number}: {shortened(name) or row.reason}")
    faults = unmatched.faults()
    if not found:
        first = faults[0].where.removeprefix(f"{path} row 1: ") if faults else "nothing"
        raise UserError(
            f"{path}: names none of the {len(images):,} images beside it; its first row leads to {first}, "
            f"the first image is {images[0]}; give paths from the folder"
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
    """`name, separator, caption` without a header: the separator is what ends an image's name in the first line."""
    with path.open("rb") as file:
        separator = _separator(path, file.readline(1 << 16).removeprefix(b"\xef\xbb\xbf"), known)
        file.seek(0)
        for line in file:
            name, _, caption = line.removeprefix(b"\xef\xbb\xbf").strip().partition(separator)
            if name or caption:
                yield Row(_image_name(name).encode(errors="surrogateescape"), (caption.strip(),))


def _separator(path: Path, first: bytes, known: set[str]) -> bytes:
    for separator in ("\t", ",", ";", "|", " "):
        name, found, _ = first.partition(separator.encode())
        if found and _image_name(name) in known:
            say(f"{path}: no header, split at the first {SEPARATORS.get(separator, 'blanks')[:-1]} of each line")
            return separator.encode()
    raise UserError(
        f"{path}: its first line does not begin with the name of an image beside it; "
        "give lines of name, tab, caption, or a table with the columns image and caption"
    )


def _image_name(name: bytes) -> str:
    return NUMBERED.sub("", name.decode(errors="surrogateescape").strip())
