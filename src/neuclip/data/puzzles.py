"""Association puzzles (WinoGAViL): which of the candidate images go with a cue."""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuclip.data.captions import json_object
from neuclip.data.decoding import DECODED
from neuclip.data.source import Source
from neuclip.data.tables.columns import first_line
from neuclip.data.tables.plain_images import PlainImages
from neuclip.errors import UserError, any_of

COLUMNS = ("cue", "candidates", "associations")
TABLES = (".csv", ".tsv", ".jsonl")
LARGEST_FIELD = 1 << 20
IMAGES = "images"

Entry = tuple[str, str, list[str], list[str]]  # place in the table, cue, candidates, associations


@dataclass(frozen=True)
class Puzzle:
    cue: str
    candidates: tuple[int, ...]  # ids of the source
    associations: tuple[int, ...]  # those that go with the cue


@dataclass(frozen=True)
class Puzzles:
    """Images occur in many puzzles; the source has each one once."""

    source: Source
    puzzles: list[Puzzle]


def read_puzzles(folder: str | Path) -> Puzzles:
    """The table and the images (`NAME.jpg`) of a folder; images may lie in `images/` below.

    >>> read_puzzles("winogavil").puzzles[0]                                                        # doctest: +SKIP
    Puzzle(cue='winter', candidates=(7, 2, 9, 4, 1), associations=(2, 4))
    """
    folder = Path(folder)
    table = puzzle_table(folder)
    files = _image_files(folder)
    ids: dict[str, int] = {}  # of images by path: two spellings of a name may mean one
    puzzles = []
    for where, cue, candidates, associations in _entries(table):
        if unknown := set(associations) - set(candidates):
            raise UserError(f"{where}: association {min(unknown)!r} is not among the candidates; correct the row")
        numbers = {}
        for name in candidates:
            if (file := files.get(name) or files.get(_loosely(name))) is None:
                raise UserError(f"{where}: no image of {name!r} in {folder}; put {name}.jpg there")
            numbers[name] = ids.setdefault(file, len(ids))
        right = dict.fromkeys(number for name, number in numbers.items() if name in associations)
        puzzles.append(Puzzle(cue, tuple(numbers[name] for name in candidates), tuple(right)))
    if not puzzles:
        raise UserError(f"{table}: holds no puzzles; give rows of {', '.join(COLUMNS)}")
    return Puzzles(PlainImages(folder.name, folder, list(ids)), puzzles)


def puzzle_table(folder: Path) -> Path:
    """The one table of the folder with the columns of puzzles."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give one with a table of {', '.join(COLUMNS)} and images")
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in TABLES)
    tables = [file for file in files if all(column.encode() in first_line(file) for column in COLUMNS)]
    if not tables:
        raise UserError(f"{folder}: no {any_of(TABLES)} file with the columns {', '.join(COLUMNS)}; put it there")
    if len(tables) > 1:
        raise UserError(f"{folder}: has {tables[0].name} and {tables[1].name}; keep one table of puzzles")
    return tables[0]


def _entries(table: Path) -> Iterator[Entry]:
    for where, row in _rows(table):
        cue, candidates, associations = (row.get(column) for column in COLUMNS)
        if not isinstance(cue, str) or not cue.strip():
            raise UserError(f"{where}: has no cue; correct the row")
        yield where, cue.strip(), _names(candidates, "candidates", where), _names(associations, "associations", where)


def _rows(table: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            if table.suffix.lower() == ".jsonl":
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{table} line {number}", json_object(line.encode()) or {}
                return
            csv.field_size_limit(LARGEST_FIELD)
            separator = "\t" if table.suffix.lower() == ".tsv" else ","
            for number, row in enumerate(csv.DictReader(file, delimiter=separator), 1):
                yield f"{table} row {number}", row
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{table}: cannot be read ({error}); save it as UTF-8, with quotes around lists") from error


def _names(value: Any, column: str, where: str) -> list[str]:
    """A list, or the text of one as JSON or Python writes it."""
    names = value
    if isinstance(value, str):
        try:
            names = json.loads(value)
        except ValueError:
            try:
                names = ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                names = None
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f'{where}: its {column} are not a list of names; write them as ["one", "two"]')
    return [name.strip() for name in names]


def _image_files(folder: Path) -> dict[str, str]:
    """Paths from the folder by the name of the candidate: as it is written, and as `_loosely` spells it."""
    files: dict[str, str] = {}
    for place in (folder / IMAGES, folder):  # what lies in the folder itself goes first
        for file in sorted(place.iterdir()) if place.is_dir() else []:
            if file.suffix.lower().removeprefix(".") in DECODED and not file.name.startswith("."):
                path = file.relative_to(folder).as_posix()
                files |= {_loosely(file.stem): path} if _loosely(file.stem) not in files else {}
                files[file.stem] = path
    return files


def _loosely(name: str) -> str:
    return name.replace("_", " ").casefold()
