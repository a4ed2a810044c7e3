"""Pairs in Arrow tables, read block by block with pyarrow: Parquet files, and saved Hugging Face data sets.

`save_to_disk` of the library `datasets` writes a folder of Arrow files and a state.json. They are read without that
library.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from neuclip.data.source import (
    FACTS,
    BadSample,
    Sample,
    Source,
    caption_facts,
    check_id,
    print_once,
    texts_in,
    usable_captions,
)
from neuclip.data.tables.listed import (
    IMAGE_COLUMNS,
    ColumnChoice,
    Columns,
    ListedPairs,
    Row,
    Rows,
    choose_columns,
    is_url,
    read_listed_image,
)
from neuclip.errors import RunFailed, UserError, require
from neuclip.files import open_regular, read_regular, reading
from neuclip.progress import track

CACHE_BYTES = 256 << 20  # of row groups that are kept in memory, per process
PIECE = 100_000  # rows whose captions are converted to Python strings at a time
STATE, SPLITS = "state.json", "dataset_dict.json"  # of a saved data set
SAVE_AGAIN = "save the set again with save_to_disk"


class Block(NamedTuple):
    """Rows that are read together: a row group of a Parquet file, or a whole Arrow file."""

    file: Path
    group: int | None
    rows: int

    def __str__(self) -> str:
        return str(self.file) if self.group is None else f"{self.file} row group {self.group}"


class ArrowPairs(Source):
    """Pairs in blocks of rows; ids number the rows of one block after the other. A block is read when a sample of it is
    needed.

    Row groups are copied into memory; each process keeps the last used ones, up to `cache_bytes`. Arrow files are
    memory-mapped: only the rows that are used are read, and all files stay open.
    """

    cache_bytes: float = CACHE_BYTES

    def __init__(self, name: str, kind: str, files: list[Path], blocks: list[Block], columns: Columns):
        self.name, self.kind, self.files, self.blocks, self.columns = name, kind, files, blocks, columns
        self._ends = np.cumsum(np.array([0, *(block.rows for block in blocks)], dtype=np.int64))
        self._tables: OrderedDict[int, Any] = OrderedDict()
        self._process = os.getpid()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, id: int) -> Sample:
        check_id(id, len(self))
        number, row = self._place(id)
        table = self._table(number)
        captions = [text for name in self.columns.captions for text in texts_in(table[name][row].as_py())]
        usable = usable_captions(captions, self.where(id))
        return Sample(self._image(table[self.columns.image][row].as_py(), id), usable)

    def _image(self, value: Any, id: int) -> bytes:
        if isinstance(value, dict):
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        if isinstance(value, bytes):
            return value
        name = value.strip() if isinstance(value, str) else ""
        return read_listed_image(self.files[0].parent, name, self.where(id))

    def where(self, id: int) -> str:
        number, row = self._place(id)
        return f"{self.blocks[number]} row {row + 1}"

    def caption_facts(self) -> Iterator[np.ndarray]:
        for block in track(self.blocks, "reading captions", len(self.blocks), "blocks"):
            table = self._read_block(block, self.columns.captions)
            for first in range(0, table.num_rows, PIECE):
                piece = table.slice(first, PIECE)
                values = zip(*(piece[name].to_pylist() for name in self.columns.captions), strict=True)
                rows = [caption_facts([text for value in row for text in texts_in(value)]) for row in values]
                yield np.array(rows, dtype=FACTS)

    def image_keys(self, ids: np.ndarray | None = None, *, read_images: bool = False) -> np.ndarray | None:
        """Keys from the images' bytes: reads all images. An image that cannot be read gets a key of its own."""
        if not read_images:
            return None
        numbers = range(len(self)) if ids is None else ids.tolist()
        keys = np.empty(len(numbers), dtype=np.uint64)
        for row, id in enumerate(track(numbers, f"comparing the images of {self.name}", len(numbers))):
            try:
                content = self[id].image
            except BadSample:
                content = b"sample %d" % id
            keys[row] = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        return keys

    def images_version(self) -> str:
        """A hash of the name, size and time of each file. It does not notice changes of images in other files."""
        status = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]
        return hashlib.sha256(repr(status).encode(errors="surrogateescape")).hexdigest()

    def _read_block(self, block: Block, columns: Sequence[str]) -> Any:
        """The pyarrow table of a block's columns."""
        if block.group is None:
            return _arrow_table(block.file).select(list(columns))
        # pyarrow's threads do not survive a fork, and data workers already run in parallel.
        return _parquet_file(block.file).read_row_group(block.group, columns=list(columns), use_threads=False)

    def _place(self, id: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._ends, id, side="right")) - 1
        return number, id - int(self._ends[number])

    def _table(self, number: int) -> Any:
        if self._process != os.getpid():  # a forked worker must not use the open files of its parent
            self._tables, self._process = OrderedDict(), os.getpid()
        if number in self._tables:
            self._tables.move_to_end(number)
            return self._tables[number]
        block = self.blocks[number]
        try:
            table = self._read_block(block, [self.columns.image, *self.columns.captions])
        except (OSError, ValueError) as error:  # base classes of pyarrow's errors and of UserError
            if not block.file.exists():
                raise RunFailed(
                    f"{block.file}: has disappeared since the run began; put it back and continue with --resume"
                ) from None
            message = " ".join(str(error).split("\n")[0].split())
            raise BadSample("block cannot be read", f"{block} ({message})") from None
        self._tables[number] = table
        while block.group is not None and len(self._tables) > 1 and self._copied_bytes() > self.cache_bytes:
            self._tables.popitem(last=False)
        return table

    def _copied_bytes(self) -> int:
        return sum(table.nbytes for table in self._tables.values())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": OrderedDict()}


def open_parquet(name: str, files: list[Path], choice: ColumnChoice) -> ArrowPairs | ListedPairs:
    """Open Parquet files. Ids number the rows of the files in the given order."""
    first = _parquet_file(files[0])
    columns = choose_columns(files[0], first.schema_arrow.names, choice)
    if not _holds_bytes(files[0], columns.image, _first_values(first, columns.image), first.schema_arrow.names):
        # Paths and captions are small enough to keep in memory, where any row can be read at once.
        return ListedPairs(name, files[0], Rows.listed(_rows(files, columns)))
    blocks, sizes = [], []
    for path in track(files, "opening", len(files), "files"):
        file = _checked_parquet(path, columns)
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            blocks.append(Block(path, group, metadata.num_rows))
            sizes.append(metadata.total_byte_size)
    if sum(sizes) > CACHE_BYTES:
        print_once(
            f"{files[0]}: to read one row, its row group of up to {max(sizes) / 1e6:,.0f} MB must be read; "
            f"shuffled training is faster from shards: neuclip data convert SOURCE FOLDER"
        )
    return ArrowPairs(name, "parquet", files, blocks, columns)


def holds_images(table: Path, choice: ColumnChoice) -> bool:
    """Whether a Parquet file has bytes or paths of images in the chosen column, or in one with a usual name. False for
    the list of URLs that img2dataset leaves beside the images it downloaded."""
    file = _parquet_file(table)
    names = file.schema_arrow.names
    column = choice.image or next((name for name in names if name.lower() in IMAGE_COLUMNS), "")
    values = _first_values(file, column) if column in names else [""]
    return not values or not all(isinstance(value, str) and (not value or is_url(value)) for value in values)


def _first_values(file: Any, column: str) -> list[Any]:
    batch = next(file.iter_batches(20, columns=[column], use_threads=False), None)
    return [value for value in (batch.column(0).to_pylist() if batch else ()) if value is not None]


def _holds_bytes(path: Path, column: str, first: list[Any], names: Sequence[str]) -> bool:
    """Whether a column contains images as bytes, alone or with a path; False if it contains paths. Raises UserError if
    it contains anything else."""
    value = first[0] if first else ""
    if isinstance(value, dict) and value.keys() & {"bytes", "path"}:  # Hugging Face's images
        return "bytes" in value
    if isinstance(value, bytes | str):
        return isinstance(value, bytes)
    raise UserError(
        f"{path}: column {column!r} has values of type {type(value).__name__}, not the bytes or paths of images; its "
        f"columns are {', '.join(names)}; name another with --data.image_column"
    )


def _checked_parquet(path: Path, columns: Columns) -> Any:
    file = _parquet_file(path)
    names = file.schema_arrow.names
    if missing := [column for column in (columns.image, *columns.captions) if column not in names]:
        raise UserError(
            f"{path}: has no column {missing[0]!r}, unlike the files before it; its columns are {', '.join(names)}; "
            "give files of one kind"
        )
    return file


def _rows(files: list[Path], columns: Columns) -> Iterator[Row]:
    """The paths and captions in Parquet files. Relative paths start at the first file's folder, or at the working
    folder."""
    for path in track(files, "reading", len(files), "files"):
        file = _checked_parquet(path, columns)
        with reading(path, "fetch or write it again"):
            for batch in file.iter_batches(columns=[columns.image, *columns.captions], use_threads=False):
                for row in batch.to_pylist():
                    image = row[columns.image]
                    image = image.get("path") if isinstance(image, dict) else image
                    captions = tuple(text for name in columns.captions for text in texts_in(row[name]))
                    yield Row((image or "").strip(), captions)


def is_saved_dataset(folder: Path) -> bool:
    return (folder / SPLITS).exists() or ((folder / STATE).exists() and (folder / "dataset_info.json").is_file())


def open_saved_dataset(name: str, folder: Path, choice: ColumnChoice) -> ArrowPairs:
    """Open a saved Hugging Face data set; ids are row numbers. A folder of splits is refused, so that a run does not
    train on test data."""
    if (folder / SPLITS).exists():
        with reading(folder / SPLITS, SAVE_AGAIN):
            splits = [str(split) for split in json.loads(read_regular(folder / SPLITS))["splits"]]
            chosen = folder / ("train" if "train" in splits else splits[0])
        raise UserError(f"{folder}: holds the parts {', '.join(splits)}; give one of them, such as {chosen}")
    with reading(folder / STATE, SAVE_AGAIN):
        state = json.loads(read_regular(folder / STATE))
        files = [folder / str(file["filename"]) for file in state.get("_data_files", [])]
        if outside := [file for file in files if file.parent != folder]:
            raise UserError(f"{folder / STATE}: names a file outside of its folder ({outside[0]}); {SAVE_AGAIN}")
        if not files:
            raise UserError(f"{folder / STATE}: names no data files; {SAVE_AGAIN}")
    tables = [_arrow_table(file) for file in track(files, "opening", len(files), "files")]
    columns = choose_columns(folder, tables[0].schema.names, choice)
    first = [value for value in tables[0][columns.image].slice(0, 20).to_pylist() if value is not None]
    _holds_bytes(folder, columns.image, first, tables[0].schema.names)
    blocks = [Block(file, None, table.num_rows) for file, table in zip(files, tables, strict=True)]
    return ArrowPairs(name, "saved data set", files, blocks, columns)


def _parquet_file(path: Path) -> Any:
    _require_pyarrow(path)
    import pyarrow.parquet

    with reading(path, "fetch or write it again"):
        open_regular(path).close()  # refuses a pipe, which would block pyarrow
        return pyarrow.parquet.ParquetFile(path, memory_map=True)


def _arrow_table(path: Path) -> Any:
    _require_pyarrow(path)
    import pyarrow

    with reading(path, SAVE_AGAIN):
        open_regular(path).close()
        with pyarrow.memory_map(str(path)) as mapped:
            return pyarrow.ipc.open_stream(mapped).read_all()


def _require_pyarrow(path: Path) -> None:
    require(f"{path}:", "pyarrow", extra="parquet")
