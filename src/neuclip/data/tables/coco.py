"""COCO's captions: one JSON file that lists images and, apart from them, captions with their image's number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neuclip.data.captions import texts_in
from neuclip.data.sample import Fault, UnindexedFaults, shorten
from neuclip.data.tables.columns import print_once
from neuclip.data.tables.listed import ListedImages, Row, Rows
from neuclip.errors import UserError


def open_coco(name: str, path: Path, content: dict[str, Any]) -> ListedImages:
    """`annotations/captions_train2017.json`, with the images in `train2017` beside it or beside its folder."""
    images, annotations = _lists(path, content)
    captions, faults = _captions_by_image(path, images, annotations)
    rows = Rows(_rows(images, captions))
    first = [os.fsdecode(rows.images[number]) for number in range(min(len(rows), 100))]
    folder = _image_folder(path, first)
    print_once(f"{path}: {len(rows):,} images from {folder}, {len(annotations):,} captions")
    return ListedImages(name, path, rows, folder, faults)


def _lists(path: Path, content: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    lists = [content.get(key) for key in ("images", "annotations")]
    if not all(isinstance(part, list) for part in lists):
        raise UserError(
            f"{path}: is not a captions file of COCO, which holds lists of images and annotations; "
            "give other lists as JSON lines, one object per line, in a file named .jsonl"
        )
    images, annotations = ([entry for entry in part or () if isinstance(entry, dict)] for part in lists)
    if not images or not any("caption" in entry for entry in annotations):
        what = "captions in its annotations" if images else "images"
        raise UserError(f"{path}: has no {what}; give a file such as captions_train2017.json")
    return images, annotations


def _captions_by_image(
    path: Path, images: list[dict[str, Any]], annotations: list[dict[str, Any]]
) -> tuple[dict[Any, list[bytes]], tuple[Fault, ...]]:
    captions: dict[Any, list[bytes]] = {_number(image.get("id")): [] for image in images}
    faults = UnindexedFaults()
    for number, annotation in enumerate(annotations, start=1):
        own = captions.get(_number(annotation.get("image_id")))
        if own is None:
            faults.note("no image", f"{path} annotation {number}: image_id {annotation.get('image_id')}")
        else:
            own.extend(text.encode() for text in texts_in(annotation.get("caption")))
    return captions, faults.faults()


def _rows(images: list[dict[str, Any]], captions: dict[Any, list[bytes]]) -> Iterator[Row]:
    for image in images:
        name = image.get("file_name")
        path = name.strip().encode(errors="surrogatepass") if isinstance(name, str) else b""
        yield Row(path, tuple(captions[_number(image.get("id"))]))


def _number(value: Any) -> Any:
    """Ids are numbers or texts; what else JSON may hold there cannot be looked up, and is nobody's."""
    return value if isinstance(value, int | str) else None


def _image_folder(path: Path, first: list[str]) -> Path:
    """Where one of the first images is: beside the file or one above, or there in a folder of the file's part."""
    part = path.stem.rpartition("_")[2]  # captions_train2017 -> train2017
    near = [path.parent, path.absolute().parent.parent]
    folders = [*near, *(place / sub for place in near for sub in (part, f"images/{part}", "images")), Path()]
    for folder in folders:
        if any(name and (folder / name).is_file() for name in first):
            return folder
    raise UserError(
        f"{path}: its first image {shorten(first[0])!r} is neither beside it nor in a folder {part} beside it or "
        f"one above; put the images into {near[-1] / part}"
    )
