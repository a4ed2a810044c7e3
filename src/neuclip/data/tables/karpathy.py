"""Karpathy's split files of Flickr8k, Flickr30k and COCO: every image with all its captions, and the split it is in.

As JSON (`dataset_flickr30k.json`, `dataset_coco.json`) or as CSV, one row per image, `raw` a list of captions as JSON.
"""

from __future__ import annotations

import ast
import csv
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from neuclip.data.captions import texts_in
from neuclip.data.sample import shorten
from neuclip.data.tables.columns import ColumnChoice, first_line, print_once, refuse_unreadable
from neuclip.data.tables.listed import ListedImages, Row, Rows, find_image_folder, image_path, is_missing
from neuclip.errors import UserError
from neuclip.formatting import plural

TRAINING, TEST = ("train", "restval"), ("test",)  # restval: the rest of COCO's val2014, which everybody trains on
CSV_COLUMNS = {"raw", "filename"}
LARGEST_FIELD = 1 << 24


class Entry(NamedTuple):
    """One image of the file."""

    filename: str
    folder: str  # COCO's `filepath`: val2014; "" where there is none
    split: str  # "" where the file has no splits
    captions: tuple[str, ...]


def is_karpathy_json(content: dict[str, Any]) -> bool:
    """Whether the images hold their captions; COCO's own file has them apart, as annotations."""
    images = content.get("images")
    return isinstance(images, list) and any(isinstance(image, dict) and "sentences" in image for image in images[:10])


def is_karpathy_csv(path: Path, choice: ColumnChoice) -> bool:
    """Whether its header has the columns of such a file, and none that the user chose for the captions."""
    with refuse_unreadable(path):
        header = first_line(path).decode(errors="replace").strip()
    names = {name.strip().strip('"').lower() for name in header.split(",")}
    return names >= CSV_COLUMNS and bool(names & {"split", "sentids"}) and choice.caption.lower() not in names


def open_karpathy(name: str, path: Path, entries: Iterable[Entry], *, retrieval: bool) -> ListedImages:
    """For retrieval the test split, else the splits that everybody trains on. Ids follow the file's order."""
    listed = list(entries)
    splits = Counter(entry.split for entry in listed)
    wanted = TEST if retrieval else TRAINING
    if set(splits) != {""}:
        listed = [entry for entry in listed if entry.split in wanted]
    if not listed:
        there = ", ".join(f"{split or 'none'} ({count:,})" for split, count in splits.items()) or "none"
        raise UserError(
            f"{path}: has no image of the split {' or '.join(wanted)}; its splits are {there}; give a file that has it"
        )
    folder, with_folders = _find_images(path, listed)
    rows = Rows(
        Row(_image_name(entry, with_folders), tuple(text.encode() for text in entry.captions)) for entry in listed
    )
    chosen = ", ".join(f"{split} ({splits[split]:,})" for split in wanted if split in splits)
    print_once(
        f"{path}: {plural(len(listed), 'image')} from {folder}, "
        f"{plural(sum(len(entry.captions) for entry in listed), 'caption')}"
        + (f"; of its splits only {chosen} for {'retrieval' if retrieval else 'training'}" if chosen else "")
    )
    source = ListedImages(name, path, rows, folder)
    source.split = wanted[0] if chosen else ""
    return source


def json_entries(content: dict[str, Any]) -> Iterator[Entry]:
    for image in content["images"]:
        if isinstance(image, dict):
            sentences = image.get("sentences")
            raw = [one.get("raw") for one in sentences if isinstance(one, dict)] if isinstance(sentences, list) else []
            yield _entry(image, texts_in(raw))


def csv_entries(path: Path) -> Iterator[Entry]:
    csv.field_size_limit(LARGEST_FIELD)
    with refuse_unreadable(path), path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file)
        names = [name.strip().lower() for name in next(reader)]
        for number, fields in enumerate(reader, start=1):
            if fields:
                row = dict(zip(names, fields, strict=False))
                captions = _list_of(row.get("raw", ""), f"{path} row {number}")
                yield _entry(row, captions)


def _list_of(text: str, where: str) -> tuple[str, ...]:
    """The captions that a field lists, as JSON or as Python writes lists."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, list):
            return texts_in(value)
    raise UserError(f"{where}: raw is no list of captions ({shorten(text, 60)!r}); fetch the file again")


def _entry(values: Mapping[str, Any], captions: tuple[str, ...]) -> Entry:
    def text(key: str) -> str:
        return value.strip() if isinstance(value := values.get(key), str) else ""

    return Entry(text("filename"), text("filepath"), text("split"), captions)


def _image_name(entry: Entry, with_folder: bool) -> bytes:
    name = f"{entry.folder}/{entry.filename}" if with_folder and entry.folder and entry.filename else entry.filename
    return name.encode(errors="surrogatepass")


def _find_images(path: Path, entries: list[Entry]) -> tuple[Path, bool]:
    """The folder that the first images are in, beside the file or in a folder there; and whether in folders of their
    own below it, as COCO's train2014 and val2014."""
    for with_folder in (True, False):
        first = [name for name in (_image_name(entry, with_folder) for entry in entries[:20]) if name]
        folder = find_image_folder(path, first)
        if any(not is_missing(image_path(folder, name)) for name in first):
            return folder, with_folder
    packed = sorted(path.parent.glob("*.zip"))
    remedy = f"unzip {packed[0]} there" if packed else "put them there"
    first_image = shorten(os.fsdecode(_image_name(entries[0], True)))
    raise UserError(f"{path}: its first image {first_image!r} is neither beside it nor in a folder there; {remedy}")
