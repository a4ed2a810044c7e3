"""Pairs that a table lists: pictures in files of their own, captions in memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neuclip.data.captions import first_caption, usable_captions
from neuclip.data.index import Texts
from neuclip.data.sample import BadSample, Fault, Sample


class Row(NamedTuple):
    """One pair as a table gives it. What is not UTF-8 stays as it is, so that only its own row is bad."""

    image: bytes  # path
    captions: tuple[bytes, ...]
    reason: str = ""  # why the row cannot be used at all


class Rows:
    """Many rows in a few arrays; millions of Python objects would not fit into memory."""

    def __init__(self, rows: Iterable[Row]):
        images, captions = bytearray(), bytearray()
        image_ends, caption_ends, row_ends = array("q"), array("q"), array("q")
        self.reasons: dict[int, str] = {}
        for number, row in enumerate(rows):
            images += row.image
            image_ends.append(len(images))
            for caption in row.captions:
                captions += caption
                caption_ends.append(len(captions))
            row_ends.append(len(caption_ends))
            if row.reason:
                self.reasons[number] = row.reason
        self.images = _texts(images, image_ends)
        self._captions = _texts(captions, caption_ends)
        self._ends = np.array(row_ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def captions(self, number: int) -> list[bytes]:
        start = int(self._ends[number - 1]) if number else 0
        return [self._captions[position] for position in range(start, int(self._ends[number]))]

    def first_captions(self) -> list[str]:
        if len(self._captions) == len(self) and bool((self._ends == np.arange(1, len(self) + 1)).all()):
            return self._captions.strings()
        return [first_caption(self.captions(number)) for number in range(len(self))]

    def __iter__(self) -> Iterator[Row]:
        for number in range(len(self)):
            yield Row(self.images[number], tuple(self.captions(number)), self.reasons.get(number, ""))


class ListedPairs:
    """Pairs of a table; ids are row numbers from 0. Relative picture paths start at `folder`."""

    def __init__(self, name: str, path: Path, rows: Rows, folder: Path | None = None, faults: tuple[Fault, ...] = ()):
        self.name = name
        self.path = path
        self.rows = rows
        self.faults = faults
        self.folder = picture_folder(path.parent, rows) if folder is None else folder

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, id: int) -> Sample:
        if not 0 <= id < len(self):
            raise IndexError(f"sample {id} of {len(self)}")
        if id in self.rows.reasons:
            raise BadSample(self.rows.reasons[id], self.where(id))
        captions = usable_captions(self.rows.captions(id), self.where(id))
        return Sample(picture_file(self.folder, self.rows.images[id], self.where(id)), captions)

    def where(self, id: int) -> str:
        """File and row, the first row after the header being row 1."""
        return f"{self.path} row {id + 1}"

    def captions(self) -> list[str]:
        """The first caption of every id; "" where there is none."""
        return self.rows.first_captions()


def picture_file(folder: Path, name: bytes, where: str) -> bytes:
    """The bytes of a picture that a row names. Raises BadSample."""
    if not name:
        raise BadSample("no picture", where)
    picture = folder / name.decode(errors="surrogateescape")
    try:
        return picture.read_bytes()
    except (OSError, ValueError):  # ValueError: a NUL byte in the path
        raise BadSample("picture file cannot be read", f"{where}: {picture}") from None


def picture_folder(beside: Path, rows: Rows) -> Path:
    """The table's own folder; the working folder where only that one leads to the first picture."""
    first = rows.images[0].decode(errors="surrogateescape").replace("\0", "") if len(rows) else ""
    return Path() if first and not (beside / first).exists() and Path(first).exists() else beside


def _texts(joined: bytearray, ends: array[int]) -> Texts:
    return Texts(np.frombuffer(bytes(joined), dtype=np.uint8), np.array(ends, dtype=np.int64))
