"""Features of a locked tower's trunk on disk: one row for each image, or for each caption, of a source.

A row is computed once for all runs on the same data with the same trunk. It counts as stored only when everything that
belongs to it is written: whatever a kill or a full disk leaves behind is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from neuclip.data.machine import cache_folder
from neuclip.data.sample import Fault
from neuclip.records import append_line, append_lines, read_lines, write_json

BAD = -1  # in counts: the sample cannot be used


class Block(NamedTuple):
    """Samples first, first + 1, ... of a source: their rows, one sample's captions together."""

    first: int
    counts: np.ndarray  # (k,) int32: rows of each sample, or BAD
    rows: np.ndarray  # (sum of the rows, width) float32
    tokens: np.ndarray | None  # of texts: (the same, L) int32
    faults: tuple[Fault, ...]  # of the bad ones


class FeatureStore:
    """The rows of one side, "image" or "text", of a source of n samples. Caption k of sample i is row k n + i: the file
    has holes, which take no space, where samples have fewer captions than others.

    Several processes may write at once: equal rows to equal places.

    >>> store = FeatureStore(folder, "image", samples=30_000)
    >>> store.write(block); store.is_complete(); store.features(7)        # doctest: +SKIP
    """

    def __init__(self, folder: Path, side: str, samples: int):
        self.folder = folder
        self.names = ["features"] if side == "image" else ["features", "tokens"]
        self.samples = samples
        self._maps: dict[str, np.ndarray] = {}

    @classmethod
    def under_key(cls, key: dict[str, Any], samples: int) -> FeatureStore:
        """In the cache folder; `key` is all that the rows depend on."""
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        return cls(cache_folder() / "features" / name, key["side"], samples)

    def describe(self, key: dict[str, Any]) -> None:
        """For whoever finds the folder and wonders what it is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "about.json", key)

    @property
    def counts(self) -> np.ndarray:  # (n,) int32
        """Rows of each sample; BAD: it cannot be used; 0: not stored yet."""
        with contextlib.suppress(FileNotFoundError):
            counts = np.fromfile(self.folder / "counts", dtype="<i4")
            if len(counts) == self.samples and self._has_rows_of(counts):
                return counts
        return np.zeros(self.samples, dtype="<i4")

    def _has_rows_of(self, counts: np.ndarray) -> bool:
        """Whether the files are as long as the counts say: someone may have tidied up, or a disk may have lost them."""
        last = int((np.arange(self.samples) + (counts - 1) * self.samples)[counts > 0].max(initial=-1))
        files = [file for name in self.names for file in self.folder.glob(f"{name}.*")]
        enough = all(file.stat().st_size >= (last + 1) * 4 * int(file.suffix[1:]) for file in files)
        return last < 0 or (enough and len(files) == len(self.names))

    def is_complete(self) -> bool:
        return bool(self.counts.all())

    def write(self, block: Block) -> None:
        """The counts last: they say that the rest is there."""
        numbers = block.first + np.arange(len(block.counts))
        repeats = np.maximum(block.counts, 0)
        plane = np.arange(len(block.rows)) - np.repeat(np.cumsum(repeats) - repeats, repeats)  # 0, 1, ... per sample
        places = plane * self.samples + np.repeat(numbers, repeats)
        if len(places):
            self._write_rows("features", places, block.rows.astype("<f4"))
        if len(places) and block.tokens is not None:
            self._write_rows("tokens", places, block.tokens.astype("<i4"))
        append_lines(self.folder / "bad.jsonl", [fault._asdict() for fault in block.faults])
        with self._open("counts", self.samples * 4) as file:
            os.pwrite(file, block.counts.astype("<i4").tobytes(), block.first * 4)

    def _write_rows(self, name: str, places: np.ndarray, rows: np.ndarray) -> None:
        """Not through the map: a disk that is full would end the process instead of raising OSError."""
        with self._open(f"{name}.{rows.shape[1]}") as file:
            ends = [*(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
            first = 0
            for end in ends:  # stretches of consecutive places
                content, offset = memoryview(rows[first:end].tobytes()), int(places[first]) * rows[0].nbytes
                while content:  # a signal or a nearly full disk may cut a write short
                    written = os.pwrite(file, content, offset)
                    content, offset = content[written:], offset + written
                first = end
            os.fsync(file)

    @contextlib.contextmanager
    def _open(self, name: str, size: int = 0) -> Iterator[int]:
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if size and os.fstat(file).st_size != size:
                os.ftruncate(file, size)
            yield file
        finally:
            os.close(file)

    def note_time(self, samples: int, seconds: float) -> None:
        append_line(self.folder / "times.jsonl", {"samples": samples, "seconds": seconds})

    @property
    def seconds_per_sample(self) -> float:
        """What computing took."""
        times = read_lines(self.folder / "times.jsonl")
        return sum(time["seconds"] for time in times) / max(1, sum(time["samples"] for time in times))

    def faults(self) -> dict[int, Fault]:
        """By id, those of the bad samples."""
        return {line["id"]: Fault(**line) for line in read_lines(self.folder / "bad.jsonl")}

    def features(self, place: int) -> np.ndarray:  # (width,) float32
        return self._map("features", "<f4")[place]

    def tokens(self, place: int) -> np.ndarray:  # (L,) int32
        return self._map("tokens", "<i4")[place]

    def _map(self, name: str, dtype: str) -> np.ndarray:
        if name not in self._maps:
            file = next(self.folder.glob(f"{name}.*"))  # its ending is the width of a row
            rows = np.memmap(file, dtype=dtype, mode="r").reshape(-1, int(file.suffix[1:]))
            self._maps[name] = np.asarray(rows)  # a plain array is indexed faster
        return self._maps[name]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}  # a data worker maps the files itself
