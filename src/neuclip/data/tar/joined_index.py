"""The rows of all shards of a data set, end to end: in memory while they are few, else one file mapped into memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from neuclip.data.captions import Captions
from neuclip.data.fingerprint import CaptionDigest
from neuclip.data.machine import cache_folder
from neuclip.data.tar.index import FORMAT, ROW, ShardIndex
from neuclip.errors import RunFailed, UserError

MAPPED_FROM = 1_000_000  # samples; fewer take at most 21 MB per process, and leave no file behind
DAY = 24 * 3600
OUTDATED_SECONDS = 7 * DAY  # unused, and its shards have changed since: before that a run may still live on it
UNFINISHED = ".unfinished-"
UNUSED_SECONDS = 30 * DAY  # whatever it is of: its shards may have moved or gone
ShardNote = tuple[int, str, str, int]  # number of the shard, then as in ShardIndex


class JoinedIndex:
    """Row of every id, and where each shard ends. A mapped one travels to other processes as the name of its file.

    >>> joined = joined_index(names, "", stamps, range(len(names)), read_shard_index)
    >>> joined.rows[5], joined.shard_of(5)
    """

    def __init__(self, rows: np.ndarray, ends: np.ndarray, notes: tuple[ShardNote, ...], place: Path | None = None):
        self.rows = rows  # (n,) of ROW
        self.ends = ends  # (shards,) int64: the id after the last of each shard
        self.notes = notes
        self.place = place  # folder of a mapped one
        self.captions_sha256: str | None = None  # of a mapped one: reading a billion captions at each start takes long

    def shard_of(self, id: int) -> int:
        return int(np.searchsorted(self.ends, id, side="right"))

    def forget(self) -> None:
        """Remove its file, so that the next source joins anew what the shards' indexes then say."""
        if self.place is not None:
            shutil.rmtree(self.place, ignore_errors=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"place": self.place} if self.place else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["place"] is None:
            self.__dict__.update(state)
            return
        mapped = read_mapped(state["place"])
        if mapped is None:
            raise RunFailed(f"{state['place']}: the index has gone while it was in use; start again with --resume")
        self.__dict__.update(mapped.__dict__)


def joined_index(
    names: Sequence[str],
    caption_key: str,
    stamps: Sequence[object],
    numbers: Iterable[int],
    load: Callable[[int], ShardIndex],
) -> JoinedIndex:
    """The rows of all shards. `names` mean the same from every folder; `stamps` change when shards change; `numbers`
    are 0, 1, ... and may show progress; `load(k)` gives the index of shard k."""
    folder = cache_folder() / "indexes" / "joined"
    shards = _digest([caption_key, *names])
    place = folder / f"{shards}-{_digest([FORMAT, *stamps])}"
    mapped = read_mapped(place)
    if mapped is not None:
        return mapped
    joining = _Joining(folder)
    try:
        for number in numbers:
            joining.add(load(number))
        if joining.file is None:
            return joining.in_memory()
        joining.finish(place, (load(number) for number in range(len(names))))
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); point NEUCLIP_CACHE to a folder with room"
        ) from error
    finally:
        joining.clean()
    _remove_unused(folder, shards, place)
    mapped = read_mapped(place)
    if mapped is None:
        raise RunFailed(f"{place}: cannot be read although it was just written; check the disk of NEUCLIP_CACHE")
    return mapped


def _remove_unused(folder: Path, shards: str, place: Path) -> None:
    """What these shards were before they changed, what nobody used for long, and what killed processes began."""
    for other in folder.iterdir():
        outdated = other.name.startswith((f"{shards}-", UNFINISHED))
        with contextlib.suppress(OSError):  # another process removes it too
            unused = time.time() - other.stat().st_mtime
            if other != place and unused > (OUTDATED_SECONDS if outdated else UNUSED_SECONDS):
                shutil.rmtree(other, ignore_errors=True)


def read_mapped(place: Path) -> JoinedIndex | None:
    """None when it is not there or not whole. From now on it counts as used now."""
    try:
        with contextlib.suppress(PermissionError):  # of another user, which may be read all the same
            os.utime(place)
        about = json.loads((place / "shards.json").read_text(encoding="utf-8"))
        ends = np.array(about["ends"], dtype=np.int64)
        rows = np.asarray(np.memmap(place / "rows", dtype=ROW, mode="r"))
        if len(rows) != ends[-1]:
            return None
    except (OSError, ValueError, KeyError, IndexError):
        return None
    joined = JoinedIndex(rows, ends, tuple((n, r, w, c) for n, r, w, c in about["notes"]), place)
    joined.captions_sha256 = about["captions_sha256"]
    return joined


class _Joining:
    """Collects rows; from MAPPED_FROM on into a file, so that a billion of them never lie in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.unfinished: Path | None = None
        self.file: Any = None
        self.rows: list[np.ndarray] = []
        self.ends: list[int] = []
        self.notes: list[ShardNote] = []
        self.captions = CaptionDigest()

    def add(self, index: ShardIndex) -> None:
        self.rows.append(index.rows)
        self.ends.append(len(index.rows) + (self.ends[-1] if self.ends else 0))
        self.notes += [(len(self.ends) - 1, *note) for note in index.notes]
        self.captions.add_lengths(Captions(index.captions, index.further))
        if self.file is None and self.ends[-1] >= MAPPED_FROM:
            self._begin_file()
        if self.file is not None:
            for rows in self.rows:
                self.file.write(rows.tobytes())
            self.rows.clear()

    def _begin_file(self) -> None:
        """Where the cache cannot be written everything stays in memory."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.unfinished = Path(tempfile.mkdtemp(dir=self.folder, prefix=UNFINISHED))
            self.file = (self.unfinished / "rows").open("wb")
        except OSError:
            return

    def in_memory(self) -> JoinedIndex:
        rows = np.concatenate(self.rows) if self.rows else np.zeros(0, ROW)
        return JoinedIndex(rows, np.array(self.ends, dtype=np.int64), tuple(self.notes))

    def finish(self, place: Path, indexes: Iterable[ShardIndex]) -> None:
        """Write the rest and move the folder into place; another process may have been faster with the same."""
        assert self.unfinished is not None
        for index in indexes:
            self.captions.add_texts(index.captions.bytes)
        about = {"ends": self.ends, "notes": self.notes, "captions_sha256": self.captions.hexdigest()}
        with (self.unfinished / "shards.json").open("w", encoding="utf-8") as file:
            json.dump(about, file)
            _to_disk(file)
        _to_disk(self.file)
        self.file.close()
        self.unfinished.chmod(0o755)  # mkdtemp's 0700 would hide it from others who share the cache
        try:
            self.unfinished.rename(place)
        except OSError:
            if read_mapped(place) is None:  # what lies there is broken
                shutil.rmtree(place, ignore_errors=True)
                self.unfinished.replace(place)

    def clean(self) -> None:
        if self.file is not None:
            self.file.close()
        if self.unfinished is not None:
            shutil.rmtree(self.unfinished, ignore_errors=True)


def _to_disk(file: IO[Any]) -> None:
    """Before the folder is moved into place: after a power cut rows of the right number might be zeros."""
    file.flush()
    os.fsync(file.fileno())


def _digest(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode(errors="surrogateescape")).hexdigest()[:16]
