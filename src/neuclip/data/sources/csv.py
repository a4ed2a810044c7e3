"""Image-text pairs listed in a CSV or TSV file: a header, then one row per pair."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from neuclip.data.sources.columns import Asked, choose_columns
from neuclip.data.sources.listed import ListedPairs, Row, Rows
from neuclip.errors import AskedWrongly

LARGEST_FIELD = 1 << 24
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}


def open_csv(name: str, path: Path, asked: Asked) -> ListedPairs:
    """A table with a header; the separator is found in it."""
    return ListedPairs(name, path, read_csv(path, asked))


def read_csv(path: Path, asked: Asked) -> Rows:
    csv.field_size_limit(LARGEST_FIELD)
    try:
        separator = separator_of(path)
        # surrogateescape keeps bytes that are not UTF-8, so that only their own row is bad.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            rows = csv.reader(file, delimiter=separator)
            names = [name.strip() for name in next(rows, [])]
            columns = choose_columns(path, names, asked, f"split at {SEPARATORS[separator]}")
            captions = [names.index(column) for column in columns.captions]
            return Rows(_rows(rows, names.index(columns.image), captions))
    except OSError as error:
        raise AskedWrongly(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except csv.Error as error:
        raise AskedWrongly(f"{path}: is not a readable table ({error}); check its quotes") from error


def _rows(rows: Iterator[list[str]], image: int, captions: list[int]) -> Iterator[Row]:
    for row in rows:
        if row:  # the reader gives an empty list for a blank line
            yield Row(_field(row, image), tuple(_field(row, caption) for caption in captions))


def _field(row: list[str], number: int) -> bytes:
    """A row too short for a column is empty there."""
    return row[number].strip().encode(errors="surrogateescape") if number < len(row) else b""


def separator_of(path: Path) -> str:
    """A tab for .tsv; else what cuts the first line into most fields (open_clip's default for .csv is a tab)."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        first = file.readline(1 << 16)
    return max(SEPARATORS, key=first.count)
