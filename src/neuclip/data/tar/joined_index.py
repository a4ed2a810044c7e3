"""The rows of all shards of a data set, end to end: in memory while they are few, else one file mapped into memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neuclip.data.captions import CaptionCounts, Captions
from neuclip.data.fingerprint import CaptionDigest
from neuclip.data.machine import cache_folder
from neuclip.data.tar.files import (
    DAY,
    NO_ROOM,
    UNFINISHED,
    UNFINISHED_SECONDS,
    mark_used,
    new_file,
    remove_unused,
)
from neuclip.data.tar.index import FORMAT, ROW, ShardIndex
from neuclip.errors import RunFailed, UserError

MAPPED_FROM = 1_000_000  # samples; fewer take at most 21 MB per process, and leave no file behind
OUTDATED_SECONDS = 7 * DAY  # unused, and its shards have changed since: before that a run may still need it
LENGTH_BYTES = 8  # the last ones of a file: how long the JSON before them is
ShardNote = tuple[int, str, str, int]  # number of the shard, then as in ShardIndex


@dataclass
class JoinedIndex:
    """Row of every id, and where each shard ends. A mapped one travels to other processes as the name of its file.

    >>> joined = join_indexes(names, "", stamps, indexes)
    >>> joined.rows[5], joined.shard_of(5)
    """

    rows: np.ndarray  # (n,) of ROW
    ends: np.ndarray  # (shards,) int64: the id after the last of each shard
    notes: tuple[ShardNote, ...]
    caption_counts: CaptionCounts
    place: Path | None = None  # file of a mapped one
    captions_sha256: str | None = None  # of a mapped one: reading a billion captions at each start takes long

    def shard_of(self, id: int) -> int:
        return int(np.searchsorted(self.ends, id, side="right"))

    def forget(self) -> None:
        """Remove its file: the next source joins anew what the indexes of the shards say then."""
        if self.place is not None:
            self.place.unlink(missing_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"place": self.place} if self.place else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["place"] is None:
            self.__dict__.update(state)
            return
        mapped = _read(state["place"])
        if mapped is None:
            raise RunFailed(f"{state['place']}: the index was removed while it was in use; start again with --resume")
        self.__dict__.update(mapped.__dict__)


def join_indexes(
    names: Sequence[str],
    caption_key: str,
    stamps: Sequence[object],
    indexes: Callable[[], Iterable[ShardIndex]],
) -> JoinedIndex:
    """The rows of all shards. `names` mean the same from every folder; `stamps` change when shards change; `indexes()`
    gives the index of each shard in turn and may be called again."""
    folder = cache_folder() / "indexes" / "joined"
    shards = _digest([caption_key, *names])
    place = folder / f"{shards}-{_digest([FORMAT, *stamps])}.rows"
    stored = _read(place)
    if stored is not None:
        return stored
    rows: list[np.ndarray] = []
    ends: list[int] = []
    notes: list[ShardNote] = []
    captions = CaptionDigest()
    for number, index in enumerate(indexes()):
        ends.append(len(index.rows) + (ends[-1] if ends else 0))
        notes += [(number, *note) for note in index.notes]
        captions.add_lengths(Captions(index.captions, index.further))
        if ends[-1] < MAPPED_FROM:
            rows.append(index.rows)
    if ends[-1] < MAPPED_FROM:
        return _in_memory(rows, ends, notes, captions)
    try:
        _write(place, indexes(), {"ends": ends, "notes": notes}, captions)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise UserError(f"{folder}: {error.strerror}; point NEUCLIP_CACHE to a folder with room") from error
        rows = [index.rows for index in indexes()]  # a cache that cannot be written
        return _in_memory(rows, ends, notes, captions)
    remove_unused((other for other in folder.glob(f"{shards}-*") if other != place), OUTDATED_SECONDS)
    remove_unused(folder.glob("[!.]*"))
    remove_unused(folder.glob(f".*{UNFINISHED}"), UNFINISHED_SECONDS)
    stored = _read(place)
    if stored is None:
        raise RunFailed(f"{place}: cannot be read although it was just written; check the disk of NEUCLIP_CACHE")
    return stored


def _in_memory(rows: list[np.ndarray], ends: list[int], notes: list[ShardNote], captions: CaptionDigest) -> JoinedIndex:
    return JoinedIndex(np.concatenate(rows), np.array(ends, dtype=np.int64), tuple(notes), captions.counts)


def _write(place: Path, indexes: Iterable[ShardIndex], facts: dict[str, Any], captions: CaptionDigest) -> None:
    """The rows, then the facts as JSON, then the length of that. Rows are never all in memory."""
    with new_file(place) as unfinished, unfinished.open("wb") as file:
        for index in indexes:
            file.write(index.rows.tobytes())
            captions.add_texts(index.captions.bytes)
        facts |= {"captions_sha256": captions.hexdigest(), "caption_counts": captions.counts}
        raw = json.dumps(facts).encode()
        file.write(raw + len(raw).to_bytes(LENGTH_BYTES, "little"))
        file.flush()
        os.fsync(file.fileno())  # after a power cut a file of the right length might hold zeros


def _read(place: Path) -> JoinedIndex | None:
    """None when it is not there or not whole. From now on it counts as used now."""
    try:
        if not mark_used(place):
            return None
        with place.open("rb") as file:
            file.seek(-LENGTH_BYTES, os.SEEK_END)
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            rows_end = file.seek(-LENGTH_BYTES - length, os.SEEK_END)
            facts = json.loads(file.read(length))
        ends = np.array(facts["ends"], dtype=np.int64)
        if rows_end != ends[-1] * ROW.itemsize:
            return None
        rows = np.asarray(np.memmap(place, dtype=ROW, mode="r", shape=(int(ends[-1]),)))
    except (OSError, ValueError, KeyError, IndexError, OverflowError):
        return None
    notes = tuple((number, reason, where, count) for number, reason, where, count in facts["notes"])
    return JoinedIndex(rows, ends, notes, CaptionCounts(*facts["caption_counts"]), place, facts["captions_sha256"])


def _digest(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode(errors="surrogateescape")).hexdigest()[:16]
