"""Image-text pairs in Parquet files: images as bytes in a column, or as paths."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from neuclip.data.captions import texts_in
from neuclip.data.tables.arrow import CACHE_BYTES, TEXTS, ArrowPairs, holds_bytes, plain_type, pyarrow_for
from neuclip.data.tables.columns import IMAGE_COLUMNS, Asked, Columns, choose_columns, is_url, say
from neuclip.data.tables.inline import is_inline
from neuclip.data.tables.listed import FIRST_PICTURES, ListedPairs, Row, Rows
from neuclip.errors import UserError
from neuclip.progress import track


def open_parquet(name: str, files: list[Path], asked: Asked) -> ArrowPairs | ListedPairs:
    """Ids run through the files in the order given, in each by row."""
    pyarrow_for(files[0])
    schema = _file(files[0]).schema_arrow
    columns = choose_columns(files[0], schema.names, asked)
    if not holds_bytes(files[0], schema, columns):
        if not any(is_inline(os.fsencode(text)) for text in _first_texts(files[0], columns.image)):
            # Paths and captions are small, and in memory any of them is at hand at once.
            return ListedPairs(name, files[0], Rows(_rows(files, columns)))
        say(f"{files[0]}: column {columns.image!r} holds images as base64 text")
    source = ParquetSource(name, files, columns)
    if source.bytes > CACHE_BYTES:
        say(
            f"{files[0]}: a row group is read whole for each of its rows, {source.largest_group / 1e6:,.0f} MB; "
            f"shuffled training is faster from shards: neuclip data convert SOURCE FOLDER"
        )
    return source


def holds_images(table: Path, asked: Asked) -> bool:
    """Whether it can be trained on: bytes or paths of images in a column that is asked for or has a usual name. False
    for the list of addresses that img2dataset leaves beside what it fetched."""
    pyarrow_for(table)
    schema = _file(table).schema_arrow
    usual = [name for name in schema.names if name.lower() in IMAGE_COLUMNS]
    column = asked.image or (usual[0] if usual else "")
    if column not in schema.names:
        return False
    if str(plain_type(schema.field(column).type)) not in TEXTS:
        return True
    texts = _first_texts(table, column)
    return not texts or not all(map(is_url, texts))


class ParquetSource(ArrowPairs):
    """Pairs with their images' bytes. A block is one row group; of all else only the numbers of rows are held."""

    def __init__(self, name: str, files: list[Path], columns: Columns):
        self.files = files
        self.groups: list[tuple[int, int]] = []  # file and row group of each block
        self.bytes = self.largest_group = 0
        rows = []
        for number, path in enumerate(track(files, "opening", len(files), "files")):
            file = _file(path)
            check_columns(path, file.schema_arrow.names, columns)
            for group in range(file.num_row_groups):
                about = file.metadata.row_group(group)
                self.groups.append((number, group))
                rows.append(about.num_rows)
                self.bytes += about.total_byte_size
                self.largest_group = max(self.largest_group, about.total_byte_size)
        super().__init__(name, files[0].parent, rows, columns)

    def read_block(self, number: int, columns: Sequence[str]) -> Any:
        file, group = self.groups[number]
        # Threads of pyarrow's own do not survive a fork, and workers are processes already.
        return _file(self.files[file]).read_row_group(group, columns=list(columns), use_threads=False)

    def block_name(self, number: int) -> str:
        file, group = self.groups[number]
        return f"{self.files[file]} row group {group}"


def check_columns(path: Path, names: Sequence[str], columns: Columns) -> None:
    for column in (columns.image, *columns.captions):
        if column not in names:
            raise UserError(
                f"{path}: has no column {column!r}, unlike the files before it; its columns are {', '.join(names)}; "
                "give files of one kind"
            )


def _rows(files: list[Path], columns: Columns) -> Iterator[Row]:
    """Paths and captions; relative paths start at the first file's folder, or at the working folder."""
    for path in track(files, "reading", len(files), "files"):
        file = _file(path)
        check_columns(path, file.schema_arrow.names, columns)
        for batch in file.iter_batches(columns=[columns.image, *columns.captions], use_threads=False):
            for row in batch.to_pylist():
                image = row[columns.image]
                image = image.get("path") if isinstance(image, dict) else image
                captions = [text.encode() for name in columns.captions for text in texts_in(row[name])]
                yield Row(os.fsencode((image or "").strip()), tuple(captions))


def _first_texts(path: Path, column: str) -> list[str]:
    batch = next(_file(path).iter_batches(FIRST_PICTURES, columns=[column], use_threads=False), None)
    return [text for text in (batch.column(0).to_pylist() if batch else ()) if isinstance(text, str) and text]


def _file(path: Path) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: is not a readable Parquet file ({reason}); fetch or write it again") from error
