"""Zero-shot classification sets: images with labels, the names of the classes, and templates for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neuclip.data import by_name
from neuclip.data.clip_benchmark_layout import DATASET_TYPE, RETRIEVAL, SHARD_COUNT, numbered_shards
from neuclip.data.decoding import NOT_DECODED_REASON
from neuclip.data.locations import is_there, nearest_path
from neuclip.data.sample import UnindexedFaults
from neuclip.data.source import Source
from neuclip.data.splits import is_part, several_parts_error
from neuclip.data.tables.columns import print_once
from neuclip.data.tables.folder import list_files
from neuclip.data.tables.plain_images import PlainImages
from neuclip.data.tar.index import NO_LABEL
from neuclip.data.tar.metadata import read_metadata
from neuclip.data.tar.source import TarSource
from neuclip.errors import UserError
from neuclip.formatting import plural

CLASSNAMES = "classnames.txt"
TEMPLATES = "zeroshot_classification_templates.txt"
PLACEHOLDER = "{c}"
DEFAULT_TEMPLATES = ("a photo of a {c}.", "a photo of the {c}.", "a picture of a {c}.", "an image of a {c}.")
LAYOUTS = f"one folder of images per class, or {CLASSNAMES} and test/0.tar, test/1.tar ... with .cls labels"


@dataclass(frozen=True)
class ZeroShotTask:
    """A folder in CLIP_benchmark's layout: classnames.txt (line = label), templates with {c}, test/*.tar with .cls. Or
    a folder of class folders: photos/cat/1.jpg, photos/dog/2.jpg. Templates may be missing.

    >>> task = ZeroShotTask.open("zeroshot/wds_cifar10")                                            # doctest: +SKIP
    """

    name: str
    classnames: list[str]
    templates: list[str]
    source: Source
    labels: list[int]  # of every id of the source
    metadata: np.ndarray | None = None  # (n, columns) int64 of `npy` members; row = id

    @classmethod
    def open(cls, address: str | Path, *, name: str = "") -> ZeroShotTask:
        """A data set by name or a folder. `name` is what figures carry, the address if there is none."""
        folder = Path(by_name.resolve(str(address)) or address)
        if not is_there(folder) or not folder.is_dir():
            near = nearest_path(folder)
            hint = f"did you mean {near}?" if near and near.is_dir() else f"give {LAYOUTS}"
            raise UserError(f"{folder}: no such folder; {hint}")
        name = name or str(address)
        if _has_shards(folder):
            return cls(name, *_open_shards(folder))
        return cls(name, *_open_class_folders(folder))


Opened = tuple[list[str], list[str], Source, list[int], np.ndarray | None]  # from class names to metadata


def _open_shards(folder: Path) -> Opened:
    _refuse_other_type(folder)
    if not (folder / CLASSNAMES).is_file():
        raise UserError(f"{folder / CLASSNAMES}: no such file; write one class name per line, in the order of labels")
    classnames = _lines(folder / CLASSNAMES)
    templates = _templates([folder])
    source = TarSource(folder.name, numbered_shards(folder / "test"))
    refuse_broken_shards(source)
    labels = _labels(source, folder, len(classnames))
    return classnames, templates, source, labels, read_metadata(source)


def _open_class_folders(folder: Path) -> Opened:
    """Classes are folders in the order of their names; an empty one is a class without images. Images nested deeper
    belong to the class."""
    images = _images_of_classes(folder)
    classes = [entry.name for entry in _subfolders(images)]
    source = _labelled_images(images, classes)
    names = next((place / CLASSNAMES for place in (images, folder) if (place / CLASSNAMES).is_file()), None)
    classnames = _lines(names) if names else [name.replace("_", " ") for name in classes]
    if names and len(classnames) != len(classes):
        raise UserError(
            f"{names}: {plural(len(classnames), 'class name')} for {len(classes)} class folders; write one line "
            f"per folder, in the order of their names ({', '.join(classes[:3])} ...), or remove the file to use the "
            "folders' names"
        )
    if names:
        print_once(f"{names}: line 1 names the class of {classes[0]}, and so on in the order of the folders' names")
    return classnames, _templates([images, folder]), source, source.labels() or [], None


def _labelled_images(folder: Path, classes: list[str]) -> PlainImages:
    files, _, others = list_files(folder)
    number = {name: label for label, name in enumerate(classes)}
    labelled = [(file, number[file.partition("/")[0]]) for file in files if "/" in file]
    if not labelled:
        shard, parent = next(folder.glob("*.tar"), None), folder.parent
        hint = f"{shard} belongs into {folder / 'test'}" if shard else f"give {LAYOUTS}"
        hint = f"did you mean {parent}?" if shard and (parent / CLASSNAMES).is_file() else hint
        raise UserError(f"{folder}: neither class folders with images nor test/0.tar; {hint}")
    if len(classes) < 2:
        raise UserError(f"{folder}: has a single class folder, {classes[0]}; give a folder with one folder per class")
    faults = UnindexedFaults()
    for file in files:
        if "/" not in file:
            faults.note("lies in no class folder", str(folder / file))
    for file in others:
        faults.note(NOT_DECODED_REASON, str(folder / file))
    images, labels = zip(*labelled, strict=True)
    return PlainImages(folder.name, folder, images, labels, faults.faults())


def _images_of_classes(folder: Path) -> Path:
    """The folder itself, or its `test` where that is its only part. `train` beside `bus` is a class."""
    names = [entry.name for entry in _subfolders(folder)]
    if not names or not all(map(is_part, names)):
        return folder
    if names == ["test"]:
        return folder / "test"
    example = folder / ("test" if "test" in names else names[0])
    raise several_parts_error(str(folder), names, str(example))


def _subfolders(folder: Path) -> list[Path]:
    entries = (entry for entry in folder.iterdir() if not entry.name.startswith((".", "__MACOSX")))
    return sorted(entry for entry in entries if entry.is_dir())


def _has_shards(folder: Path) -> bool:
    test = folder / "test"
    return (test / SHARD_COUNT).is_file() or (test.is_dir() and any(test.glob("*.tar")))


def _refuse_other_type(folder: Path) -> None:
    stated = folder / DATASET_TYPE
    kind = stated.read_text(encoding="utf-8").strip() if stated.is_file() else "classification"
    if kind == RETRIEVAL:
        raise UserError(f"{stated}: it is a retrieval set; give it as retrieval data, not for zero-shot")
    if kind != "classification":
        raise UserError(f"{stated}: sets of type {kind!r} are not read; give one with a single label per image")


def _lines(path: Path) -> list[str]:
    """Stripped lines. Blank ones stay: a class may have an empty name, and dropping it shifts all labels."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")]
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8; save it as UTF-8") from None
    if not any(lines):
        raise UserError(f"{path}: the file is empty; write one entry per line")
    return lines


def _templates(folders: Sequence[Path]) -> list[str]:
    path = next((place / TEMPLATES for place in folders if (place / TEMPLATES).is_file()), None)
    if path is None:
        listed = ", ".join(map(repr, DEFAULT_TEMPLATES))
        print_once(f"{folders[0]}: no {TEMPLATES}; prompts are {listed}")
        return list(DEFAULT_TEMPLATES)
    templates = _lines(path)
    for number, template in enumerate(templates, 1):
        if PLACEHOLDER not in template:
            raise UserError(
                f"{path} line {number}: no {PLACEHOLDER} in {template!r}; write {PLACEHOLDER} where the class name goes"
            )
    return templates


def refuse_broken_shards(source: TarSource) -> None:
    """In training a cut-off shard loses some samples; in a test set it would change what is measured."""
    broken = next((fault for fault in source.faults if fault.reason.startswith("shard ")), None)
    if broken:
        raise UserError(f"{broken.where}: {broken.reason}; a test set must be whole, copy the shard again")
    if len(source) == 0:
        raise UserError(f"{source.shards[0]}: holds no image; each sample needs an image and a .cls member")


def _labels(source: TarSource, folder: Path, classes: int) -> list[int]:
    labels = source.joined.rows["label"].tolist()
    if NO_LABEL in labels:
        where = source.where(labels.index(NO_LABEL))
        raise UserError(f"{where}: has no label; each image needs a .cls member with a whole number from 0 on")
    outside = next((id for id, label in enumerate(labels) if not 0 <= label < classes), None)
    if outside is not None:
        raise UserError(
            f"{source.where(outside)}: label {labels[outside]}, but {folder / CLASSNAMES} has {classes} lines "
            f"(labels 0 to {classes - 1}); correct one of them"
        )
    return labels
