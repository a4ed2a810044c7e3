"""Pairs in Arrow tables, read block by block: what Parquet files and saved Hugging Face data sets have in common."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from neuclip.data.captions import texts_in, usable_captions
from neuclip.data.sample import BadSample, Fault, Sample
from neuclip.data.source import Source
from neuclip.data.tables.columns import Columns
from neuclip.data.tables.listed import image_file
from neuclip.data.texts import PIECE, Captions
from neuclip.errors import RunFailed, UserError
from neuclip.progress import track

CACHE_BYTES = 256 << 20  # of blocks that are copied into memory, per process
BYTES = ("binary", "large_binary", "binary_view")  # types by name, for pyarrow 15 cannot ask for the views
TEXTS = ("string", "large_string", "string_view")


def pyarrow_for(path: Path) -> ModuleType:
    """pyarrow, which is an optional extra."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: needs pyarrow; pip install 'neuclip[parquet]'") from None
    return pyarrow


def holds_bytes(path: Path, schema: Any, columns: Columns) -> bool:
    """Whether the image column holds bytes, alone or with a path beside; False for paths. Else it is refused."""
    pyarrow = pyarrow_for(path)
    kind = plain_type(schema.field(columns.image).type)
    if pyarrow.types.is_struct(kind):  # Hugging Face's images: {"bytes", "path"}
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


def plain_type(kind: Any) -> Any:
    """Of a column that names its values by number (pandas's categories) the type of the values."""
    return getattr(kind, "value_type", kind) if str(kind).startswith("dictionary<") else kind


class ArrowPairs(Source):
    """Pairs of blocks of rows; ids run through the blocks. A block is read when a sample of it is asked for.

    Blocks stay in memory up to `cache_bytes`, the last used ones, in each process for itself.
    """

    cache_bytes: float = CACHE_BYTES

    def __init__(self, name: str, folder: Path, blocks: Sequence[int], columns: Columns):
        self.name = name
        self.folder = folder  # where relative image paths start
        self.columns = columns
        self.faults: tuple[Fault, ...] = ()
        self._ends = np.cumsum(np.array(blocks, dtype=np.int64))
        self._forget()

    @abstractmethod
    def read_block(self, number: int, columns: Sequence[str]) -> Any:
        """The pyarrow table of a block's columns."""

    @abstractmethod
    def block_name(self, number: int) -> str:
        """How a person finds the block: its file and place."""

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, id: int) -> Sample:
        if not 0 <= id < len(self):
            raise IndexError(f"sample {id} of {len(self)}")
        number, row = self._place(id)
        table = self._block(number)
        captions = [text for name in self.columns.captions for text in texts_in(table[name][row].as_py())]
        usable = usable_captions(captions, self.where(id))
        return Sample(self._image(table[self.columns.image][row].as_py(), id), usable)

    def where(self, id: int) -> str:
        number, row = self._place(id)
        return f"{self.block_name(number)} row {row + 1}"

    def captions(self) -> list[str]:
        """The first caption of every id, "" where there is none; reads no images."""
        return [text for captions in self.caption_pieces() for text in captions.first.strings()]

    def caption_pieces(self) -> Iterator[Captions]:
        """The captions of every id, some at a time; reads no images."""
        for number in track(range(len(self._ends)), "reading captions", len(self._ends), "blocks"):
            table = self.read_block(number, self.columns.captions)
            for first in range(0, table.num_rows, PIECE):
                piece = table.slice(first, PIECE)
                values = zip(*(piece[name].to_pylist() for name in self.columns.captions), strict=True)
                yield Captions.of([text for value in row for text in texts_in(value)] for row in values)

    def _place(self, id: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._ends, id, side="right"))
        return number, id - (int(self._ends[number - 1]) if number else 0)

    def _block(self, number: int) -> Any:
        if self._process != os.getpid():
            self._forget()  # a forked worker must not read through its parent's open files
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        try:
            table = self.read_block(number, [self.columns.image, *self.columns.captions])
        except (OSError, ValueError, UserError) as error:  # pyarrow's own errors are of the first two kinds
            if isinstance(error.__cause__ or error, FileNotFoundError):  # it was there when the run began
                raise RunFailed(
                    f"{self.block_name(number)}: has gone; put it back and continue with --resume"
                ) from None
            reason = str(error).splitlines()[0]
            raise BadSample("block cannot be read", f"{self.block_name(number)} ({reason})") from None
        self._blocks[number] = table
        while len(self._blocks) > 1 and sum(block.nbytes for block in self._blocks.values()) > self.cache_bytes:
            self._blocks.popitem(last=False)
        return table

    def _image(self, value: Any, id: int) -> bytes:
        name = value
        if isinstance(value, dict):
            name = value.get("path") if value.get("bytes") is None else value["bytes"]
        if isinstance(name, bytes):
            return name
        return image_file(self.folder, os.fsencode(name.strip()) if isinstance(name, str) else b"", self.where(id))

    def _forget(self) -> None:
        self._process = os.getpid()
        self._blocks: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": OrderedDict()}
