"""Pairs in Arrow tables, read block by block with pyarrow: Parquet files, and data sets that Hugging Face saved.

What `save_to_disk` of `datasets` leaves is a folder of Arrow files beside a state.json; it needs that library no more.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from neuclip.data.captions import PIECE, Captions, texts_in, usable_captions
from neuclip.data.sample import BadSample, Sample
from neuclip.data.source import Source
from neuclip.data.splits import several_parts_error
from neuclip.data.tables.columns import (
    IMAGE_COLUMNS,
    ColumnChoice,
    Columns,
    choose_columns,
    is_url,
    print_once,
    read_json_file,
)
from neuclip.data.tables.listed import FIRST_IMAGES, ListedPairs, Row, Rows, is_base64, read_image
from neuclip.errors import RunFailed, UserError
from neuclip.progress import track

CACHE_BYTES = 256 << 20  # of blocks that are copied into memory, per process
BYTES = ("binary", "large_binary", "binary_view")  # types by name, for pyarrow 15 cannot ask for the views
TEXTS = ("string", "large_string", "string_view")
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
    """Pairs of blocks of rows; ids run through the blocks. A block is read when a sample of it is asked for.

    Row groups are copied into memory, and the last used ones stay there up to `cache_bytes`, in each process for
    itself. Arrow files are memory-mapped: only what is touched is read, and all may stay open.
    """

    cache_bytes: float = CACHE_BYTES
    images_in_rows = True

    def __init__(self, name: str, kind: str, files: list[Path], blocks: list[Block], columns: Columns):
        self.name = name
        self.kind = kind
        self.files = files
        self.blocks = blocks
        self.columns = columns
        self._ends = np.cumsum(np.array([block.rows for block in blocks], dtype=np.int64))
        self._forget_blocks()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, id: int) -> Sample:
        self.check_id(id)
        number, row = self._place(id)
        table = self._table(number)
        captions = [text for name in self.columns.captions for text in texts_in(table[name][row].as_py())]
        usable = usable_captions(captions, self.where(id))
        return Sample(self._image(table[self.columns.image][row].as_py(), id), usable)

    def where(self, id: int) -> str:
        number, row = self._place(id)
        return f"{self.blocks[number]} row {row + 1}"

    def caption_pieces(self) -> Iterator[Captions]:
        for block in track(self.blocks, "reading captions", len(self.blocks), "blocks"):
            table = self.read_block(block, self.columns.captions)
            for first in range(0, table.num_rows, PIECE):
                piece = table.slice(first, PIECE)
                values = zip(*(piece[name].to_pylist() for name in self.columns.captions), strict=True)
                yield Captions.of([text for value in row for text in texts_in(value)] for row in values)

    def read_block(self, block: Block, columns: Sequence[str]) -> Any:
        """The pyarrow table of a block's columns."""
        if block.group is None:
            return read_arrow_file(block.file).select(list(columns))
        # Threads of pyarrow's own do not survive a fork, and workers are processes already.
        return open_parquet_file(block.file).read_row_group(block.group, columns=list(columns), use_threads=False)

    def _place(self, id: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._ends, id, side="right"))
        return number, id - (int(self._ends[number - 1]) if number else 0)

    def _table(self, number: int) -> Any:
        if self._process != os.getpid():
            self._forget_blocks()  # a forked worker must not read through its parent's open files
        if number in self._tables:
            self._tables.move_to_end(number)
            return self._tables[number]
        block = self.blocks[number]
        try:
            table = self.read_block(block, [self.columns.image, *self.columns.captions])
        except (OSError, ValueError, UserError) as error:  # pyarrow's own errors are of the first two kinds
            if isinstance(error.__cause__ or error, FileNotFoundError):  # it was there when the run began
                raise RunFailed(f"{block}: has gone; put it back and continue with --resume") from None
            raise BadSample("block cannot be read", f"{block} ({_reason(error)})") from None
        self._tables[number] = table
        while block.group is not None and len(self._tables) > 1 and self._copied_bytes() > self.cache_bytes:
            self._tables.popitem(last=False)
        return table

    def _copied_bytes(self) -> int:
        return sum(table.nbytes for table in self._tables.values())

    def _image(self, value: Any, id: int) -> bytes:
        name = value
        if isinstance(value, dict):
            name = value.get("path") if value.get("bytes") is None else value["bytes"]
        if isinstance(name, bytes):
            return name
        path = os.fsencode(name.strip()) if isinstance(name, str) else b""
        return read_image(self.files[0].parent, path, self.where(id))

    def _forget_blocks(self) -> None:
        self._process = os.getpid()
        self._tables: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": OrderedDict()}


def open_parquet(name: str, files: list[Path], choice: ColumnChoice) -> ArrowPairs | ListedPairs:
    """Ids run through the files in the order given, in each by row."""
    schema = open_parquet_file(files[0]).schema_arrow
    columns = choose_columns(files[0], schema.names, choice)
    if not holds_bytes(files[0], schema, columns):
        if not any(is_base64(os.fsencode(text)) for text in _first_texts(files[0], columns.image)):
            # Paths and captions are small, and in memory any of them is at hand at once.
            return ListedPairs(name, files[0], Rows(_rows(files, columns)))
        print_once(f"{files[0]}: column {columns.image!r} holds images as base64 text")
    blocks, sizes = [], []
    for path in track(files, "opening", len(files), "files"):
        file = open_parquet_file(path)
        check_columns(path, file.schema_arrow.names, columns)
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            blocks.append(Block(path, group, metadata.num_rows))
            sizes.append(metadata.total_byte_size)
    if sum(sizes) > CACHE_BYTES:
        print_once(
            f"{files[0]}: a row group is read whole for each of its rows, {max(sizes) / 1e6:,.0f} MB; "
            f"shuffled training is faster from shards: neuclip data convert SOURCE FOLDER"
        )
    return ArrowPairs(name, "parquet", files, blocks, columns)


def is_saved_dataset(folder: Path) -> bool:
    return (folder / SPLITS).is_file() or ((folder / STATE).is_file() and (folder / "dataset_info.json").is_file())


def open_saved_dataset(name: str, folder: Path, choice: ColumnChoice) -> ArrowPairs:
    """Ids are row numbers. A folder of splits is refused: test data must not slip into training."""
    if (folder / SPLITS).is_file():
        splits = [str(split) for split in read_json_file(folder / SPLITS, SAVE_AGAIN).get("splits", [])]
        if not splits:
            raise UserError(f"{folder / SPLITS}: names no splits; {SAVE_AGAIN}")
        chosen = folder / ("train" if "train" in splits else splits[0])
        raise several_parts_error(str(folder), splits, str(chosen))
    state = read_json_file(folder / STATE, SAVE_AGAIN)
    files = [folder / str(file["filename"]) for file in state.get("_data_files", [])]
    outside = [file for file in files if file.parent != folder]
    if outside:
        raise UserError(f"{folder / STATE}: names a file outside of its folder ({outside[0]}); {SAVE_AGAIN}")
    if not files:
        raise UserError(f"{folder / STATE}: names no data files; {SAVE_AGAIN}")
    schema = read_arrow_file(files[0]).schema
    columns = choose_columns(folder, schema.names, choice)
    holds_bytes(folder, schema, columns)
    opened = track(files, "opening", len(files), "files")
    blocks = [Block(file, None, read_arrow_file(file).num_rows) for file in opened]
    return ArrowPairs(name, "saved data set", files, blocks, columns)


def holds_images(table: Path, choice: ColumnChoice) -> bool:
    """Whether a Parquet file can be trained on: bytes or paths of images in a column that is chosen or has a usual
    name. False for the list of addresses that img2dataset leaves beside what it fetched."""
    schema = open_parquet_file(table).schema_arrow
    usual = [name for name in schema.names if name.lower() in IMAGE_COLUMNS]
    column = choice.image or (usual[0] if usual else "")
    if column not in schema.names:
        return False
    if str(_value_type(schema.field(column).type)) not in TEXTS:
        return True
    texts = _first_texts(table, column)
    return not texts or not all(map(is_url, texts))


def holds_bytes(path: Path, schema: Any, columns: Columns) -> bool:
    """Whether the image column holds bytes, alone or with a path beside; False for paths. Else it is refused."""
    kind = _value_type(schema.field(columns.image).type)
    if _pyarrow(path).types.is_struct(kind):  # Hugging Face's images: {"bytes", "path"}
        fields = {kind.field(number).name for number in range(kind.num_fields)}
        if fields & {"bytes", "path"}:
            return "bytes" in fields
    elif str(kind) in BYTES:
        return True
    elif str(kind) in TEXTS:
        return False
    raise UserError(
        f"{path}: column {columns.image!r} holds {kind}, not the bytes or paths of images; "
        f"its columns are {', '.join(schema.names)}; name another with --data.image_column"
    )


def _value_type(kind: Any) -> Any:
    """Of a column that names its values by number (pandas's categories) the type of the values."""
    return kind.value_type if str(kind).startswith("dictionary<") else kind


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
        file = open_parquet_file(path)
        check_columns(path, file.schema_arrow.names, columns)
        for batch in file.iter_batches(columns=[columns.image, *columns.captions], use_threads=False):
            for row in batch.to_pylist():
                image = row[columns.image]
                image = image.get("path") if isinstance(image, dict) else image
                captions = [text.encode() for name in columns.captions for text in texts_in(row[name])]
                yield Row(os.fsencode((image or "").strip()), tuple(captions))


def _first_texts(path: Path, column: str) -> list[str]:
    batch = next(open_parquet_file(path).iter_batches(FIRST_IMAGES, columns=[column], use_threads=False), None)
    return [text for text in (batch.column(0).to_pylist() if batch else ()) if isinstance(text, str) and text]


def open_parquet_file(path: Path) -> Any:
    _pyarrow(path)
    import pyarrow.parquet

    return _read(path, lambda: pyarrow.parquet.ParquetFile(path, memory_map=True), "Parquet", "fetch or write it again")


def read_arrow_file(path: Path) -> Any:
    pyarrow = _pyarrow(path)

    def read() -> Any:
        with pyarrow.memory_map(str(path)) as mapped:
            return pyarrow.ipc.open_stream(mapped).read_all()

    return _read(path, read, "Arrow", "save the set again")


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: needs pyarrow; pip install 'neuclip[parquet]'") from None
    return pyarrow


def _read(path: Path, read: Callable[[], Any], form: str, remedy: str) -> Any:
    try:
        return read()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is not a readable {form} file ({_reason(error)}); {remedy}") from error


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
