"""Image-text pairs listed in a JSON lines file: one object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neuclip.data.captions import texts_in
from neuclip.data.tables.columns import Asked, Columns, choose_columns, refuse_no_text
from neuclip.data.tables.listed import ListedPairs, Row, Rows
from neuclip.errors import UserError


def open_jsonl(name: str, path: Path, asked: Asked) -> ListedPairs:
    """Keys are found in the first line; a list of texts is several captions."""
    return ListedPairs(name, path, read_jsonl(path, asked))


def read_jsonl(path: Path, asked: Asked) -> Rows:
    try:
        with path.open("rb") as file:
            lines = (line for line in file if line.strip())
            first = next(lines, b"{}").removeprefix(b"\xef\xbb\xbf")
            refuse_no_text(path, first)
            found = _object(first)
            if found is None:
                raise UserError(f"{path}: line 1 is not a JSON object; give one object per line")
            if not found:
                return Rows(())
            columns = choose_columns(path, [*found], asked)
            return Rows(_rows(first, lines, columns))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


def _rows(first: bytes, lines: Iterator[bytes], columns: Columns) -> Iterator[Row]:
    yield _row(first, columns)
    for line in lines:
        yield _row(line, columns)


def _row(line: bytes, columns: Columns) -> Row:
    found = _object(line)
    if found is None:
        return Row(b"", (), "line is not a JSON object")
    image = found.get(columns.image)
    if isinstance(image, dict):  # as Hugging Face writes images
        image = image.get("path")
    captions = [text.encode() for column in columns.captions for text in texts_in(found.get(column))]
    # A name of half a character leads to no file; surrogatepass keeps it from stopping the whole table.
    return Row(image.strip().encode(errors="surrogatepass") if isinstance(image, str) else b"", tuple(captions))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
