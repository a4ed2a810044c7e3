"""Features of a locked tower's trunk on disk: one row for each image, or for each caption, of a source.

A row is computed once for all runs on the same data with the same trunk. Samples are written block by block; a block
counts as stored only when its checksum fits what is there: whatever a kill, a full disk or a bad disk leaves behind is
computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from neuclip.data.source import Source
from neuclip.files import cache_folder, open_regular, write_json

BAD = -1  # in counts: the sample cannot be used
TYPES = {"features": "<f4", "tokens": "<i4", "counts": "<i4", "checksums": "<u4"}


class Block(NamedTuple):
    """Samples first, first + 1, ... of a source: their rows, one sample's captions together."""

    first: int
    counts: np.ndarray  # (k,) int32: rows of each sample, or BAD
    rows: dict[str, np.ndarray]  # "features" (r, width) float32; of texts also "tokens" (r, L) int32


class FeatureStore:
    """The rows of one side of a source of n samples. Caption k of sample i is row k n + i: the file has holes, which
    take no space, where samples have fewer captions than others. Several processes may write at once.

    >>> store = FeatureStore({"side": "image"}, samples=30_000, block=64)                           # doctest: +SKIP
    >>> store.write(block); store.missing(range(store.blocks)); store.rows("features")[7]           # doctest: +SKIP
    """

    def __init__(self, key: dict[str, Any], samples: int, block: int):
        """`key` is all that the rows depend on."""
        self.key, self.samples, self.block = key, samples, block
        self.names = ("features", "tokens") if key["side"] == "text" else ("features",)
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        self.folder = cache_folder() / "features" / digest
        self.blocks = -(-samples // block)
        self._maps: dict[str, np.ndarray] = {}

    def describe(self) -> None:
        """For whoever finds the folder and wonders what it is."""
        write_json(self.folder / "about.json", self.key)

    def missing(self, blocks: Iterable[int]) -> list[int]:
        """Those of the blocks that are not stored, or not as they were written."""
        counts, checksums = self.counts(), self._numbers("checksums", self.blocks)
        missing = [number for number in blocks if int(checksums[number]) != self._checksum(number, counts)]
        self._maps = {}  # of files as they were before the missing blocks are written
        return missing

    def write(self, block: Block) -> None:
        """The checksum last: it says that the rest is there."""
        places, counts = self._places(block.first, block.counts), block.counts.astype("<i4")
        rows = {name: block.rows[name].astype(TYPES[name]) for name in self.names} if len(places) else {}
        for name, content in rows.items():
            with self._open(f"{name}.{content.shape[1]}") as file:
                cuts = np.flatnonzero(np.diff(places) != 1) + 1
                for run in np.split(np.arange(len(places)), cuts):  # stretches of consecutive places
                    _write(file, content[run].tobytes(), int(places[run[0]]) * content[0].nbytes)
        with self._open("counts") as file:
            _write(file, counts.tobytes(), block.first * 4)
        with self._open("checksums") as file:
            _write(file, _checksum(counts, rows.values()).to_bytes(4, "little"), block.first // self.block * 4)

    def rows(self, name: str) -> np.ndarray:
        """(places, width) of "features" or "tokens", mapped."""
        if name not in self._maps:
            file = next(self.folder.glob(f"{name}.*"))  # its ending is the width of a row
            width = int(file.suffix[1:])
            open_regular(file).close()
            whole = file.stat().st_size // 4 // width
            self._maps[name] = np.asarray(np.memmap(file, TYPES[name], "r", shape=(whole, width)))
        return self._maps[name]

    def counts(self) -> np.ndarray:  # (n,) int32
        """Rows of each sample; BAD: it cannot be used; 0: not stored."""
        return self._numbers("counts", self.samples)

    def _numbers(self, name: str, length: int) -> np.ndarray:
        numbers = np.zeros(length, TYPES[name])
        try:
            with open_regular(self.folder / name) as file:
                stored = np.frombuffer(file.read(4 * length), TYPES[name], count=-1)
        except (OSError, ValueError):  # not there, or a part of a number: it is written again
            return numbers
        numbers[: len(stored)] = stored
        return numbers

    def _places(self, first: int, counts: np.ndarray) -> np.ndarray:
        """The rows of consecutive samples, those of one sample together."""
        repeats = np.maximum(counts, 0)
        plane = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)  # 0, 1, ... of each sample
        return plane * self.samples + np.repeat(first + np.arange(len(counts)), repeats)

    def _checksum(self, number: int, counts: np.ndarray) -> int:
        """Of what is on the disk; -1 if that cannot be what was written."""
        first = number * self.block
        own = counts[first : first + self.block]
        try:
            rows = int(np.maximum(own, 0).sum(dtype=np.int64))
            if not own.all() or (rows and rows > len(self.rows("features"))):
                return -1
            places = self._places(first, own)
            return _checksum(own, [self.rows(name)[places] for name in self.names] if len(places) else [])
        except (StopIteration, IndexError, ValueError, OSError, MemoryError):
            return -1

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        """Not through a map: a disk that is full would end the process instead of raising OSError."""
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            yield file
            os.fsync(file)
        finally:
            os.close(file)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}  # a data worker maps the files itself


def _checksum(counts: np.ndarray, rows: Iterable[np.ndarray]) -> int:
    checksum = zlib.crc32(counts.tobytes())
    for content in rows:
        checksum = zlib.crc32(np.ascontiguousarray(content).tobytes(), checksum)
    return checksum or 1  # 0 means that nothing is stored


def _write(file: int, content: bytes, offset: int) -> None:
    while content:  # a signal or a nearly full disk may cut a write short
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written


Place = tuple[FeatureStore, int]  # a store and a row of it


class StoredSide:
    """Where the rows of each sample of a training set are, of its images or of its captions. Features are stored by the
    sources that a mixture is made of: they stay valid whatever data.hold_out takes away, in whatever mixture they are.
    """

    def __init__(self, source: Source, stores: Sequence[FeatureStore]):
        self.source, self.stores = source, list(stores)
        self.counts = [store.counts() for store in stores]

    def draw(self, id: int) -> Place | None:
        """Of several captions one is drawn, as from the source itself. None for a sample that cannot be used."""
        places = self.places(id)
        return random.choice(places) if len(places) > 1 else next(iter(places), None)

    def places(self, id: int) -> list[Place]:
        """Of the image, or of all captions; none of a sample that cannot be used."""
        (number,), (own,) = self.source.places(np.array([id]))
        store, count = self.stores[number], int(self.counts[number][own])
        return [(store, int(own) + caption * store.samples) for caption in range(count)]

    def only_rows(self, ids: np.ndarray) -> dict[str, Tensor] | None:  # (k,) -> (k, width) each
        """Where each of these samples has one row. None where something is to be drawn, or cannot be used."""
        numbers, own = self.source.places(ids)
        parts = [(number, numbers == number) for number in np.unique(numbers).tolist()]
        if any((self.counts[number][own[here]] != 1).any() for number, here in parts):
            return None
        rows = {}
        for name in self.stores[0].names:
            whole = [self.stores[number].rows(name)[own[here]] for number, here in parts]
            rows[name] = np.empty((len(ids), whole[0].shape[1]), TYPES[name])
            for (_, here), own_rows in zip(parts, whole, strict=True):
                rows[name][here] = own_rows
        return {name: torch.from_numpy(of_all) for name, of_all in rows.items()}


def stored_rows(name: str, places: Sequence[Place]) -> Tensor:  # (len(places), width)
    """The rows "features" or "tokens" at these places."""
    return torch.from_numpy(np.stack([store.rows(name)[place] for store, place in places]))
