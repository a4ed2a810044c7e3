"""Captions in one JSON file: COCO's own, which lists images and captions separately, and Karpathy's splits of COCO and
Flickr.

Karpathy's file also exists as CSV, with one row per image and a JSON list of captions in the column `raw`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from neuclip.data.faults import list_faults
from neuclip.data.source import print_once, shorten, texts_in
from neuclip.data.tables.listed import ColumnChoice, ListedPairs, Row, Rows, find_image_folder, image_path, is_missing
from neuclip.data.tables.text import first_line, list_in, read_small_table
from neuclip.errors import UserError
from neuclip.files import read_regular, reading
from neuclip.formatting import plural

REMEDY = "fetch it again"
TRAINING, TEST = ("train", "restval"), ("test",)  # restval: the rest of COCO's val2014, usually used for training
CSV_COLUMNS = {"raw", "filename"}


def open_json(name: str, path: Path, *, retrieval: bool) -> ListedPairs:
    """Open a captions file of COCO or of Karpathy."""
    with reading(path, REMEDY):
        content = json.loads(read_regular(path))
        content = content if isinstance(content, dict) else {}
        images = content.get("images")
        first = images[:10] if isinstance(images, list) else []
        if any(isinstance(image, dict) and "sentences" in image for image in first):
            return _open_karpathy(name, path, _json_entries(content["images"]), retrieval=retrieval)
        return _open_coco(name, path, content)


def _open_coco(name: str, path: Path, content: dict[str, Any]) -> ListedPairs:
    """Open a file such as `annotations/captions_train2017.json`, with its images in `train2017` beside it or beside its
    folder."""
    lists = [content.get(key) for key in ("images", "annotations")]
    if not all(isinstance(part, list) for part in lists):
        raise UserError(
            f"{path}: is not a captions file of COCO, which has lists of images and annotations; "
            "give other data as JSON lines, one object per line, in a file named .jsonl"
        )
    images, annotations = ([entry for entry in part or () if isinstance(entry, dict)] for part in lists)
    if not images or not any("caption" in entry for entry in annotations):
        what = "captions in its annotations" if images else "images"
        raise UserError(f"{path}: has no {what}; give a file such as captions_train2017.json")
    captions: dict[Any, list[str]] = {_number(image.get("id")): [] for image in images}
    unmatched = []
    for number, annotation in enumerate(annotations, start=1):
        image_captions = captions.get(_number(annotation.get("image_id")))
        if image_captions is None:
            unmatched.append(("no image", f"{path} annotation {number}: image_id {annotation.get('image_id')}"))
        else:
            image_captions.extend(texts_in(annotation.get("caption")))
    rows = Rows.listed(Row(_text(image, "file_name"), tuple(captions[_number(image.get("id"))])) for image in images)
    folder = _coco_folder(path, [rows[number].image for number in range(min(len(rows), 100))])
    print_once(f"{path}: {len(rows):,} images from {folder}, {len(annotations):,} captions")
    return ListedPairs(name, path, rows, folder=folder, faults=list_faults(unmatched), by_image=True)


def _number(value: Any) -> Any:
    """An image's id, which is a number or a text; None for any other JSON value, which cannot be a key."""
    return value if isinstance(value, int | str) else None


def _text(values: Mapping[str, Any], key: str) -> str:
    return value.strip() if isinstance(value := values.get(key), str) else ""


def _coco_folder(path: Path, first: list[str]) -> Path:
    """The folder with one of the first images: the file's folder or the one above it, or in either the folder of the
    file's part (train2017)."""
    part = path.stem.rpartition("_")[2]  # captions_train2017 -> train2017
    near = [path.parent, path.absolute().parent.parent]
    folders = [*near, *(place / sub for place in near for sub in (part, f"images/{part}", "images")), Path()]
    for folder in folders:
        if any(name and not is_missing(folder / name) for name in first):
            return folder
    raise UserError(
        f"{path}: its first image {shorten(first[0])!r} is neither beside it nor in a folder {part} beside it or "
        f"one above; put the images into {near[-1] / part}"
    )


class Entry(NamedTuple):
    """One image of Karpathy's file."""

    filename: str
    folder: str  # COCO's `filepath`, such as val2014; "" if missing
    split: str  # "" if the file has no splits
    captions: tuple[str, ...]

    def image(self, with_folder: bool) -> str:
        return f"{self.folder}/{self.filename}" if with_folder and self.folder and self.filename else self.filename


def is_karpathy_csv(path: Path, choice: ColumnChoice) -> bool:
    """Whether a CSV's header has the columns of Karpathy's file, and no caption column that the user chose."""
    header = first_line(path).decode(errors="replace").strip()
    names = {name.strip().strip('"').lower() for name in header.split(",")}
    return names >= CSV_COLUMNS and bool(names & {"split", "sentids"}) and choice.caption.lower() not in names


def open_karpathy_csv(name: str, path: Path, *, retrieval: bool) -> ListedPairs:
    return _open_karpathy(name, path, _csv_entries(path), retrieval=retrieval)


def _open_karpathy(name: str, path: Path, entries: Iterable[Entry], *, retrieval: bool) -> ListedPairs:
    """Open the test split for retrieval, else the usual training splits. Ids follow the file's order."""
    listed = list(entries)
    splits = Counter(entry.split for entry in listed)
    wanted = TEST if retrieval else TRAINING
    if set(splits) != {""}:
        listed = [entry for entry in listed if entry.split in wanted]
    if not listed:
        available = ", ".join(f"{split or 'none'} ({count:,})" for split, count in splits.items()) or "none"
        raise UserError(
            f"{path}: has no image of the split {' or '.join(wanted)}; its splits are {available}; give a file that "
            "has it"
        )
    folder, with_folder = _find_images(path, listed)
    rows = Rows.listed(Row(entry.image(with_folder), entry.captions) for entry in listed)
    chosen = ", ".join(f"{split} ({splits[split]:,})" for split in wanted if split in splits)
    captions = sum(len(entry.captions) for entry in listed)
    print_once(
        f"{path}: {plural(len(listed), 'image')} from {folder}, {plural(captions, 'caption')}"
        + (f"; of its splits only {chosen} for {'retrieval' if retrieval else 'training'}" if chosen else "")
    )
    return ListedPairs(name, path, rows, folder=folder, by_image=True)


def _json_entries(images: list[Any]) -> Iterator[Entry]:
    for image in images:
        if isinstance(image, dict):
            sentences = image.get("sentences")
            raw = [one.get("raw") for one in sentences if isinstance(one, dict)] if isinstance(sentences, list) else []
            yield Entry(_text(image, "filename"), _text(image, "filepath"), _text(image, "split"), texts_in(raw))


def _csv_entries(path: Path) -> Iterator[Entry]:
    for where, row in read_small_table(path, REMEDY):
        captions = list_in(row.get("raw", ""))
        if captions is None:
            raise UserError(f"{where}: raw is not a list of captions ({shorten(row.get('raw', ''), 60)!r}); {REMEDY}")
        yield Entry(_text(row, "filename"), _text(row, "filepath"), _text(row, "split"), texts_in(captions))


def _find_images(path: Path, entries: list[Entry]) -> tuple[Path, bool]:
    """The folder of the first images (the file's folder, or a folder in it), and whether the images are in its
    subfolders that the entries name, such as COCO's train2014 and val2014."""
    for with_folder in (True, False):
        first = [name for name in (entry.image(with_folder) for entry in entries[:20]) if name]
        folder = find_image_folder(path, first)
        if any(not is_missing(image_path(folder, name)) for name in first):
            return folder, with_folder
    packed = sorted(path.parent.glob("*.zip"))
    remedy = f"unzip {packed[0]} there" if packed else "put them there"
    first_image = shorten(entries[0].image(True))
    raise UserError(f"{path}: its first image {first_image!r} is neither beside it nor in a folder there; {remedy}")
