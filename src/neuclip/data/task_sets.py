"""Opens sets for zero-shot classification (images with labels, class names, templates) and association puzzles."""

from __future__ import annotations

import io
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from neuclip.data import by_name
from neuclip.data.decoding import DECODED, NOT_DECODED_REASON
from neuclip.data.faults import list_faults
from neuclip.data.locations import (
    DATASET_TYPE,
    RETRIEVAL,
    SHARD_COUNT,
    dataset_type,
    is_part,
    is_there,
    nearest_path,
    numbered_shards,
)
from neuclip.data.source import Source, print_once
from neuclip.data.tables.folder import list_images
from neuclip.data.tables.listed import ListedPairs, Row, Rows
from neuclip.data.tables.text import first_line, list_in, read_small_table
from neuclip.data.tar.index import NO_LABEL, key_and_ending
from neuclip.data.tar.source import TarSource
from neuclip.data.tar.walk import BLOCK, walk
from neuclip.errors import UserError, any_of
from neuclip.files import open_regular, read_regular, reading
from neuclip.formatting import plural

CLASSNAMES = "classnames.txt"
TEMPLATES = "zeroshot_classification_templates.txt"
PLACEHOLDER = "{c}"
DEFAULT_TEMPLATES = ("a photo of a {c}.", "a photo of the {c}.", "a picture of a {c}.", "an image of a {c}.")
LAYOUTS = f"one folder of images per class, or {CLASSNAMES} and test/0.tar, test/1.tar ... with .cls labels"
FIRST_MEMBERS = 100  # if a shard has vectors, at least one is among so many first members
MOST_VECTOR_BYTES = 1 << 16  # enough for a few numbers and their header
VECTORS = "each image needs one vector of whole numbers, all equally long"
COLUMNS = ("cue", "candidates", "associations")
TABLES = (".csv", ".tsv", ".jsonl")
IMAGES = "images"  # the folder of a puzzle's images, beside its table
MOST_CANDIDATES = 1000  # per puzzle


@dataclass(frozen=True)
class ZeroShotTask:
    """A set for zero-shot classification. It is a folder in CLIP_benchmark's layout (classnames.txt with one line per
    label, templates with {c}, test/*.tar with .cls members), or a folder of class folders: photos/cat/1.jpg,
    photos/dog/2.jpg. Templates may be missing.

    >>> task = ZeroShotTask.open("zeroshot/wds_cifar10")                                            # doctest: +SKIP
    """

    name: str
    classnames: list[str]
    templates: list[str]
    source: Source
    labels: list[int]  # one per sample of the source
    metadata: np.ndarray | None = None  # (n, columns) int64, from the `npy` members; row = id

    @classmethod
    def open(cls, address: str | Path, *, name: str = "") -> ZeroShotTask:
        """Open a data set by name or a folder. `name` is its name in results; default: the data path."""
        folder = Path(by_name.resolve(str(address)) or address)
        if not is_there(folder) or not folder.is_dir():
            near = nearest_path(folder)
            hint = f"did you mean {near}?" if near and near.is_dir() else f"give {LAYOUTS}"
            raise UserError(f"{folder}: no such folder; {hint}")
        name = name or str(address)
        test = folder / "test"
        if is_there(test / SHARD_COUNT) or (test.is_dir() and any(test.glob("*.tar"))):
            return cls(name, *_open_labelled_shards(folder))
        return cls(name, *_open_class_folders(folder))


def _open_labelled_shards(folder: Path) -> tuple[list[str], list[str], Source, list[int], np.ndarray | None]:
    kind = dataset_type(folder) or "classification"
    if kind == RETRIEVAL:
        raise UserError(f"{folder / DATASET_TYPE}: it is a retrieval set; give it as retrieval data, not for zero-shot")
    if kind != "classification":
        raise UserError(
            f"{folder / DATASET_TYPE}: type {kind[:40]!r} is not supported; give a set with a single label per image"
        )
    if not is_there(folder / CLASSNAMES):
        raise UserError(f"{folder / CLASSNAMES}: no such file; write one class name per line, in the order of labels")
    classnames, templates = _lines(folder / CLASSNAMES), _templates([folder])
    source = TarSource(folder.name, numbered_shards(folder / "test"))
    # In training, a cut-off shard loses some samples; in a test set, it would change the results.
    if broken := next((fault for fault in source.faults if fault.reason.startswith("shard ")), None):
        raise UserError(f"{broken.where}: {broken.reason}; a test set must be complete, copy the shard again")
    if len(source) == 0:
        raise UserError(f"{source.shards[0]}: has no image; each sample needs an image and a .cls member")
    labels = source.labels.tolist()
    if NO_LABEL in labels:
        where = source.where(labels.index(NO_LABEL))
        raise UserError(f"{where}: has no label; each image needs a .cls member with a whole number of 0 or more")
    if outside := [id for id, label in enumerate(labels) if label >= len(classnames)]:
        raise UserError(
            f"{source.where(outside[0])}: label {labels[outside[0]]}, but {folder / CLASSNAMES} has "
            f"{len(classnames)} lines (labels 0 to {len(classnames) - 1}); correct one of them"
        )
    return classnames, templates, source, labels, read_metadata(source)


def _open_class_folders(folder: Path) -> tuple[list[str], list[str], Source, list[int]]:
    """Open a folder of class folders. Labels number them in the order of their names; an empty folder is a class
    without images. Images in deeper folders belong to the class too."""
    images = _images_of_classes(folder)
    classes = [entry.name for entry in _subfolders(images)]
    files, _, others = list_images(images)
    number = {name: label for label, name in enumerate(classes)}
    labelled = [(file, number[file.partition("/")[0]]) for file in files if "/" in file]
    if not labelled:
        shard, parent = next(images.glob("*.tar"), None), images.parent
        hint = f"{shard} belongs into {images / 'test'}" if shard else f"give {LAYOUTS}"
        hint = f"did you mean {parent}?" if shard and is_there(parent / CLASSNAMES) else hint
        raise UserError(f"{images}: neither class folders with images nor test/0.tar; {hint}")
    if len(classes) < 2:
        raise UserError(f"{images}: has a single class folder, {classes[0]}; give a folder with one folder per class")
    unused = [("is in no class folder", str(images / file)) for file in files if "/" not in file]
    unused += [(NOT_DECODED_REASON, str(images / file)) for file in others]
    source = _plain_images(images, [file for file, _ in labelled], list_faults(unused))
    names = next((place / CLASSNAMES for place in (images, folder) if is_there(place / CLASSNAMES)), None)
    classnames = _lines(names) if names else [name.replace("_", " ") for name in classes]
    if names and len(classnames) != len(classes):
        raise UserError(
            f"{names}: {plural(len(classnames), 'class name')} for {len(classes)} class folders; write one line "
            f"per folder, in the order of their names ({', '.join(classes[:3])} ...), or remove the file to use the "
            "folders' names"
        )
    if names:
        print_once(f"{names}: line 1 is the class name of folder {classes[0]}, and so on in the order of folder names")
    return classnames, _templates([images, folder]), source, [label for _, label in labelled]


def _plain_images(folder: Path, images: Sequence[str], faults: tuple[Any, ...] = ()) -> ListedPairs:
    rows = Rows.listed(Row(image, ()) for image in images)
    return ListedPairs(folder.name, folder, rows, folder=folder, kind="folder", faults=faults, captions=False)


def _images_of_classes(folder: Path) -> Path:
    """The folder itself, or its subfolder `test` if it has no other. `train` beside a folder `bus` is a class."""
    names = [entry.name for entry in _subfolders(folder)]
    if not names or not all(map(is_part, names)):
        return folder
    if names == ["test"]:
        return folder / "test"
    example = folder / ("test" if "test" in names else names[0])
    raise UserError(f"{folder}: holds the parts {', '.join(names)}; give one of them, such as {example}")


def _subfolders(folder: Path) -> list[Path]:
    entries = (entry for entry in folder.iterdir() if not entry.name.startswith((".", "__MACOSX")))
    return sorted(entry for entry in entries if entry.is_dir())


def _lines(path: Path) -> list[str]:
    """The stripped lines of a file. Blank lines stay: a class may have an empty name, and without it all following
    labels would be wrong."""
    with reading(path, "write one entry per line, in UTF-8"):
        text = read_regular(path, 1 << 28).decode("utf-8-sig").removesuffix("\n")
    lines = [line.strip() for line in text.split("\n")]
    if not any(lines):
        raise UserError(f"{path}: the file is empty; write one entry per line")
    return lines


def _templates(folders: Sequence[Path]) -> list[str]:
    path = next((place / TEMPLATES for place in folders if is_there(place / TEMPLATES)), None)
    if path is None:
        listed = ", ".join(map(repr, DEFAULT_TEMPLATES))
        print_once(f"{folders[0]}: no {TEMPLATES}; prompts are {listed}")
        return list(DEFAULT_TEMPLATES)
    templates = _lines(path)
    for number, template in enumerate(templates, 1):
        if PLACEHOLDER not in template:
            raise UserError(
                f"{path} line {number}: no {PLACEHOLDER} in {template[:80]!r}; write {PLACEHOLDER} where the class "
                "name goes"
            )
    return templates


def read_metadata(source: TarSource) -> np.ndarray | None:
    """The numbers in the `npy` members beside the images (region, year, hospital ...), (n, columns) int64; None if no
    sample has any. Members are matched to images by name, not by order. No image is read."""
    contents: list[bytes] = []
    starts = [0, *source.ends.tolist()]
    for shard, path in enumerate(source.paths):
        blocks = source.rows["image_block"][starts[shard] : starts[shard + 1]]
        contents += _members_beside(path, blocks.tolist())
    start = next((id for id, content in enumerate(contents) if content), None)
    if start is None:
        return None
    first = _vector(source, start, contents[start])
    size, header = len(contents[start]), contents[start][: -first.nbytes]
    if header.endswith(b"\n") and all(len(content) == size and content.startswith(header) for content in contents):
        numbers = b"".join(content[len(header) :] for content in contents)  # faster: one by one takes 0.1 ms each
        return np.frombuffer(numbers, first.dtype).reshape(len(contents), len(first)).astype(np.int64)
    return np.stack([_vector(source, id, content, len(first)) for id, content in enumerate(contents)]).astype(np.int64)


def _members_beside(path: Path, blocks: list[int]) -> list[bytes]:
    """The content of the `npy` member beside each image, or b"". `blocks` are the first blocks of the images."""
    if not blocks:
        return []
    by_key: dict[bytes, bytes] = {}
    keys: dict[int, bytes] = {}
    with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        members, _ = walk(data)
        if not any(name.lower().endswith(b".npy") for name, _, _ in islice(members, FIRST_MEMBERS)):
            return [b""] * len(blocks)
        for member, offset, size in members:
            key, ending = key_and_ending(member)
            if ending == b"npy":
                by_key[key] = data[offset : offset + min(size, MOST_VECTOR_BYTES)]
            else:
                keys[offset // BLOCK] = key
    return [by_key.get(keys.get(block, b""), b"") for block in blocks]


def _vector(source: TarSource, id: int, content: bytes, columns: int = 0) -> np.ndarray:
    """The vector in one sample's `npy` member. Raises UserError if its length differs from `columns`. Pickled objects
    are refused, because reading them would execute code."""
    if not content:
        raise UserError(f"{source.where(id)}: has no npy member, others have {columns} numbers in one; {VECTORS}")
    where = f"{source.where(id).rpartition('.')[0]}.npy"
    try:
        vector = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (ValueError, TypeError, EOFError, OSError, SyntaxError, RecursionError, MemoryError) as error:
        raise UserError(f"{where}: is not a complete array of numbers ({str(error)[:100]}); {VECTORS}") from error
    if vector.ndim != 1 or vector.dtype.kind not in "iu" or not len(vector):
        raise UserError(f"{where}: has shape {vector.shape} and type {vector.dtype}; {VECTORS}")
    if columns and len(vector) != columns:
        raise UserError(f"{where}: has {len(vector)} numbers, others have {columns}; {VECTORS}")
    return vector


@dataclass(frozen=True)
class Puzzle:
    """The task of finding those of the candidate images that are associated with a cue."""

    cue: str
    candidates: tuple[int, ...]  # ids in the source
    associations: tuple[int, ...]  # the candidates that are associated with the cue


@dataclass(frozen=True)
class Puzzles:
    """Association puzzles (WinoGAViL). An image may be in many puzzles, but is in the source only once."""

    source: Source
    puzzles: list[Puzzle]


def read_puzzles(folder: str | Path) -> Puzzles:
    """Read the puzzles of a folder: its table, and the images `NAME.jpg` in the folder or in its subfolder `images`.

    >>> read_puzzles("winogavil").puzzles[0]                                                        # doctest: +SKIP
    Puzzle(cue='winter', candidates=(7, 2, 9, 4, 1), associations=(2, 4))
    """
    folder = Path(folder)
    table, files = puzzle_table(folder), _puzzle_images(folder)
    ids: dict[str, int] = {}  # by the image's path, because two spellings of a name may mean the same image
    puzzles = []
    for where, row in read_small_table(table, "save it as UTF-8, with quotes around lists"):
        cue = row.get("cue")
        if not isinstance(cue, str) or not cue.strip():
            raise UserError(f"{where}: has no cue; correct the row")
        candidates, associations = (_names(row.get(column), column, where) for column in COLUMNS[1:])
        if unknown := set(associations) - set(candidates):
            raise UserError(f"{where}: association {min(unknown)!r} is not among the candidates; correct the row")
        numbers = {}
        for name in candidates:
            if (file := files.get(name) or files.get(ignore_case_and_underscores(name))) is None:
                raise UserError(f"{where}: no image of {name!r} in {folder}; put {name}.jpg there")
            numbers[name] = ids.setdefault(file, len(ids))
        correct = {number: None for name, number in numbers.items() if name in set(associations)}
        puzzles.append(Puzzle(cue.strip(), tuple(numbers[name] for name in candidates), tuple(correct)))
    if not puzzles:
        raise UserError(f"{table}: has no puzzles; give rows of {', '.join(COLUMNS)}")
    return Puzzles(_plain_images(folder, list(ids)), puzzles)


def puzzle_table(folder: Path) -> Path:
    """The folder's only table with the columns of puzzles. Raises UserError if there is none, or several."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give one with a table of {', '.join(COLUMNS)} and images")
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in TABLES)
    tables = [file for file in files if all(column.encode() in first_line(file) for column in COLUMNS)]
    if not tables:
        raise UserError(f"{folder}: no {any_of(TABLES)} file with the columns {', '.join(COLUMNS)}; put it there")
    if len(tables) > 1:
        raise UserError(f"{folder}: has {tables[0].name} and {tables[1].name}; keep one table of puzzles")
    return tables[0]


def _names(value: Any, column: str, where: str) -> list[str]:
    """The names in a field, which is a list or the text of a list. Raises UserError for anything else."""
    names = list_in(value) if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f'{where}: its {column} are not a list of names; write them as ["one", "two"]')
    if len(names) > MOST_CANDIDATES:
        raise UserError(f"{where}: has {len(names):,} {column}, the limit is {MOST_CANDIDATES:,}; correct the row")
    return [name.strip() for name in names]


def _puzzle_images(folder: Path) -> dict[str, str]:
    """The path of each image (from the folder) by its name, and also by its name without case and underscores."""
    files: dict[str, str] = {}
    for place in (folder / IMAGES, folder):  # later entries override: an image in the folder itself is preferred
        for file in sorted(place.iterdir()) if place.is_dir() else []:
            if file.suffix.lower().removeprefix(".") in DECODED and not file.name.startswith("."):
                path = file.relative_to(folder).as_posix()
                files.setdefault(ignore_case_and_underscores(file.stem), path)
                files[file.stem] = path
    return files


def ignore_case_and_underscores(name: str) -> str:
    return name.replace("_", " ").casefold()
