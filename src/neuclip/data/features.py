"""Stores the features of a locked tower's trunk on disk: one row for each image, or for each caption, of a source.

A row is computed once for all runs with the same data and the same trunk. Samples are written in blocks. A block counts
as stored only if its checksum is right: what a kill, a full disk or a bad disk spoilt is computed again.
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
    """The rows of samples first, first + 1, ... of a source; the rows of a sample's captions are consecutive."""

    first: int
    counts: np.ndarray  # (k,) int32: rows of each sample, or BAD
    rows: dict[str, np.ndarray]  # "features" (r, width) float32; for texts also "tokens" (r, L) int32


class FeatureStore:
    """The rows of one side (images or texts) of a source of n samples. Caption k of sample i is row k n + i. If a
    sample has fewer captions than others, the file has holes, which take no disk space. Several processes may write at
    once.

    >>> store = FeatureStore({"side": "image"}, samples=30_000, block=64)                           # doctest: +SKIP
    >>> store.write(block); store.missing(range(store.blocks)); store.rows("features")[7]           # doctest: +SKIP
    """

    def __init__(self, key: dict[str, Any], samples: int, block: int):
        """`key` contains everything that the rows depend on."""
        self.key, self.samples, self.block = key, samples, block
        self.names = ("features", "tokens") if key["side"] == "text" else ("features",)
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        self.folder = cache_folder() / "features" / digest
        self.blocks = -(-samples // block)
        self._maps: dict[str, np.ndarray] = {}

    def describe(self) -> None:
        """Write the key to a file in the folder, for people who find it."""
        write_json(self.folder / "about.json", self.key)

    def missing(self, blocks: Iterable[int]) -> list[int]:
        """Those of the blocks that are not stored, or are damaged."""
        counts, checksums = self.counts(), self._numbers("checksums", self.blocks)
        missing = [number for number in blocks if int(checksums[number]) != self._checksum(number, counts)]
        self._maps = {}  # the files may grow when the missing blocks are written
        return missing

    def write(self, block: Block) -> None:
        """Write a block. Its checksum is written last: it says that the rest is complete."""
        places, counts = self._places(block.first, block.counts), block.counts.astype("<i4")
        rows = {name: block.rows[name].astype(TYPES[name]) for name in self.names} if len(places) else {}
        for name, content in rows.items():
            with self._open(f"{name}.{content.shape[1]}") as file:
                cuts = np.flatnonzero(np.diff(places) != 1) + 1
                for stretch in np.split(np.arange(len(places)), cuts):  # rows that are consecutive in the file
                    _write(file, content[stretch].tobytes(), int(places[stretch[0]]) * content[0].nbytes)
        with self._open("counts") as file:
            _write(file, counts.tobytes(), block.first * 4)
        with self._open("checksums") as file:
            _write(file, _checksum(counts, rows.values()).to_bytes(4, "little"), block.first // self.block * 4)

    def rows(self, name: str) -> np.ndarray:
        """All rows (number of rows, width) of "features" or "tokens", as a memory map."""
        if name not in self._maps:
            file = next(self.folder.glob(f"{name}.*"))  # its ending is the width of a row
            width = int(file.suffix[1:])
            open_regular(file).close()
            complete = file.stat().st_size // 4 // width
            self._maps[name] = np.asarray(np.memmap(file, TYPES[name], "r", shape=(complete, width)))
        return self._maps[name]

    def counts(self) -> np.ndarray:  # (n,) int32
        """The number of rows of each sample; BAD if it cannot be used, 0 if it is not stored."""
        return self._numbers("counts", self.samples)

    def _numbers(self, name: str, length: int) -> np.ndarray:
        numbers = np.zeros(length, TYPES[name])
        try:
            with open_regular(self.folder / name) as file:
                stored = np.frombuffer(file.read(4 * length), TYPES[name], count=-1)
        except (OSError, ValueError):  # missing, or cut off within a number: it is written again
            return numbers
        numbers[: len(stored)] = stored
        return numbers

    def _places(self, first: int, counts: np.ndarray) -> np.ndarray:
        """The row numbers in the file of consecutive samples; those of one sample's captions come together."""
        repeats = np.maximum(counts, 0)
        captions = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)  # 0, 1, ... per sample
        return captions * self.samples + np.repeat(first + np.arange(len(counts)), repeats)

    def _checksum(self, number: int, counts: np.ndarray) -> int:
        """The checksum of a block's content on disk; -1 if it is obviously damaged."""
        first = number * self.block
        block_counts = counts[first : first + self.block]
        try:
            rows = int(np.maximum(block_counts, 0).sum(dtype=np.int64))
            if not block_counts.all() or (rows and rows > len(self.rows("features"))):
                return -1
            places = self._places(first, block_counts)
            return _checksum(block_counts, [self.rows(name)[places] for name in self.names] if len(places) else [])
        except (StopIteration, IndexError, ValueError, OSError, MemoryError):
            return -1

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        """Open a file for writing. A memory map would not do: on a full disk it kills the process instead of raising
        OSError."""
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            yield file
            os.fsync(file)
        finally:
            os.close(file)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}  # each data worker maps the files itself


def _checksum(counts: np.ndarray, rows: Iterable[np.ndarray]) -> int:
    checksum = zlib.crc32(counts.tobytes())
    for content in rows:
        checksum = zlib.crc32(np.ascontiguousarray(content).tobytes(), checksum)
    return checksum or 1  # 0 means that nothing is stored


def _write(file: int, content: bytes, offset: int) -> None:
    while content:  # a signal or a nearly full disk may cut a write short
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written


Place = tuple[FeatureStore, int]  # a store and the number of a row in it


class StoredSide:
    """Finds the stored rows of each sample of a training set, for its images or its captions. Each source of a mixture
    has its own store, so stored features stay valid when data.hold_out or the mixture changes."""

    def __init__(self, source: Source, stores: Sequence[FeatureStore]):
        self.source, self.stores = source, list(stores)
        self.counts = [store.counts() for store in stores]

    def draw(self, id: int) -> Place | None:
        """The place of a sample's row; if it has several captions, of a random one, drawn as from the source itself.
        None if the sample cannot be used."""
        places = self.places(id)
        return random.choice(places) if len(places) > 1 else next(iter(places), None)

    def places(self, id: int) -> list[Place]:
        """The places of the image's row or of the rows of all captions; [] if the sample cannot be used."""
        (number,), (part_id,) = self.source.places(np.array([id]))
        store, count = self.stores[number], int(self.counts[number][part_id])
        return [(store, int(part_id) + caption * store.samples) for caption in range(count)]

    def only_rows(self, ids: np.ndarray) -> dict[str, Tensor] | None:  # (k,) -> (k, width) each
        """The rows of these samples if each has exactly one. None if a sample has several or cannot be used."""
        numbers, part_ids = self.source.places(ids)
        parts = [(number, numbers == number) for number in np.unique(numbers).tolist()]
        if any((self.counts[number][part_ids[mask]] != 1).any() for number, mask in parts):
            return None
        rows = {}
        for name in self.stores[0].names:
            part_rows = [self.stores[number].rows(name)[part_ids[mask]] for number, mask in parts]
            rows[name] = np.empty((len(ids), part_rows[0].shape[1]), TYPES[name])
            for (_, mask), content in zip(parts, part_rows, strict=True):
                rows[name][mask] = content
        return {name: torch.from_numpy(content) for name, content in rows.items()}


def stored_rows(name: str, places: Sequence[Place]) -> Tensor:  # (len(places), width)
    """The rows of "features" or "tokens" at these places."""
    return torch.from_numpy(np.stack([store.rows(name)[place] for store, place in places]))
