"""Image-text pairs listed in a JSON lines file: one object per line."""

from __future__ import annotations

import codecs
from itertools import chain
from pathlib import Path

from neuclip.data.captions import json_object, texts_in
from neuclip.data.tables.columns import ColumnChoice, Columns, choose_columns, refuse_no_text, refuse_unreadable
from neuclip.data.tables.listed import Row, Rows
from neuclip.errors import UserError


def read_jsonl(path: Path, choice: ColumnChoice) -> Rows:
    """The keys are chosen from the first line; a list of texts is several captions."""
    with refuse_unreadable(path), path.open("rb") as file:
        lines = (line for line in file if line.strip())
        first = next(lines, b"{}").removeprefix(codecs.BOM_UTF8)
        refuse_no_text(path, first)
        keys = json_object(first)
        if keys is None:
            raise UserError(f"{path}: line 1 is not a JSON object; give one object per line")
        if not keys:
            return Rows(())
        columns = choose_columns(path, [*keys], choice)
        return Rows(_row(line, columns) for line in chain([first], lines))


def _row(line: bytes, columns: Columns) -> Row:
    values = json_object(line)
    if values is None:
        return Row(b"", (), "line is not a JSON object")
    image = values.get(columns.image)
    if isinstance(image, dict):  # as Hugging Face writes images
        image = image.get("path")
    captions = [text.encode() for column in columns.captions for text in texts_in(values.get(column))]
    # A name of half a character leads to no file; surrogatepass keeps it from stopping the whole table.
    return Row(image.strip().encode(errors="surrogatepass") if isinstance(image, str) else b"", tuple(captions))
