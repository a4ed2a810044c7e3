"""Image-text pairs in tar shards (the webdataset layout), read at their byte offsets."""

from __future__ import annotations

import errno
import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from neuclip.data.captions import Captions, other_keys, usable_captions
from neuclip.data.sample import BadSample, Fault, Sample, UnindexedFaults
from neuclip.data.source import ShardFacts, Source, SourceFiles, file_version
from neuclip.data.tar.gzip import PACKED_CUT_OFF, is_packed, mark_copy_used, plain_tars
from neuclip.data.tar.index import (
    BLOCK,
    JSON_CAPTION,
    MOST_CAPTION_BYTES,
    NO_CAPTION,
    NO_LABEL,
    ShardIndex,
    build_index,
    captions_of,
    index_places,
    load_index,
    status_of,
    store_index,
)
from neuclip.data.tar.joined_index import join_indexes
from neuclip.data.tar.walk import CUT_OFF, NO_END_MARK
from neuclip.errors import RunFailed
from neuclip.progress import track

ENDS_EARLY = (CUT_OFF, NO_END_MARK, PACKED_CUT_OFF)
MOST_LISTED = 1000  # places of one reason: nobody reads a hundred thousand of them
OPEN_FILES = 128  # per process; systems often allow 1024 and a large set has ten thousand shards

# The shards that this process has open, the last used ones, by number of the source and of its shard: one limit holds
# for all sources together. A forked worker may share its parent's: pread has no position of its own.
_open_files: OrderedDict[tuple[int, int], int] = OrderedDict()
_source_numbers = count()


def close_files(source: int | None = None) -> None:
    """Those of a source that is no longer used, or all."""
    for key in [key for key in _open_files if source is None or key[0] == source]:
        os.close(_open_files.pop(key))


def open_count(source: int) -> int:
    return sum(key[0] == source for key in _open_files)


class TarSource(Source):
    """Pairs of one or many shards; ids run through the shards in the order given, in each by position.

    Captions are those of `txt` members, else of the key "caption" of `json` members; with a `caption_key`, those of
    that key of `json` members alone; with LINES in its place, all lines of `txt` members. It holds 21 bytes per sample:
    from a million samples on not in memory, but in a mapped file that all processes of a machine share.
    """

    kind = "tar"
    most_open = 0  # files; 0: as many as all sources together may
    paths: Sequence[Path] = ()  # plain tars on this disk; none of remote shards
    statuses: Sequence[tuple[int, int]] = ()  # size and time of each shard when it was indexed, where others can write

    def __init__(self, name: str, shards: Sequence[Path], caption_key: str = ""):
        self.paths = plain_tars(shards)
        self.statuses = [status_of(path) for path in self.paths]
        identities = [str(path.resolve()) for path in self.paths]  # which mean the same from every folder
        self._join(name, [str(shard) for shard in shards], caption_key, identities, self.statuses)

    def _join(
        self, name: str, shards: list[str], caption_key: str, identities: list[str], stamps: Sequence[object]
    ) -> None:
        """Join the indexes of all shards. The stamp of a shard changes when the shard changes."""
        self.name = name
        self.shards = shards  # as messages name them
        self.caption_key = caption_key
        self.changes: dict[str, str] = {}  # what has changed since a shard was indexed
        self._start_in_process()
        self.joined = join_indexes(identities, caption_key, stamps, self._indexes)
        self.captions_sha256 = self.joined.captions_sha256
        self.caption_counts = self.joined.caption_counts
        self.texts_are_captions = not caption_key
        self.faults = self._unindexed()
        if self.changes:
            first, change = next(iter(self.changes.items()))
            more = len(self.changes) - 1
            others = f" and {more} more shard{' has' if more == 1 else 's have'} changed" if more else ""
            print(f"{first}: {change}{others}; indexed again", file=sys.stderr)

    def _indexes(self) -> Iterator[ShardIndex]:
        for shard in track(range(len(self.shards)), "indexing", len(self.shards), "shards"):
            yield self.index(shard)

    def _unindexed(self) -> tuple[Fault, ...]:
        """What never became a sample. A missing end mark is a fault only where other shards have one: some writers
        leave none."""
        lost, notes = UnindexedFaults(listed=MOST_LISTED), self.joined.notes
        without_mark = {shard for shard, reason, _, _ in notes if reason in ENDS_EARLY}
        for shard, reason, place, times in notes:
            if reason != NO_END_MARK or len(without_mark) < len(self.shards):
                lost.note(reason, f"{self.shards[shard]}{place}", max(1, times))
        return lost.faults()

    def _start_in_process(self) -> None:
        self._number = next(_source_numbers)  # no other source of this process has it
        weakref.finalize(self, close_files, self._number)

    def index(self, shard: int) -> ShardIndex:
        """Read from its file, or built and stored."""
        index, change = load_index(self.paths[shard], self.caption_key)
        if change:
            self.changes[self.shards[shard]] = change
        return index

    def reread(self, shard: int) -> ShardIndex:
        """The index of a shard as it is now, whatever is stored."""
        return build_index(self.paths[shard], self.caption_key)

    def store(self, shard: int, index: ShardIndex) -> None:
        """For sources that are opened from now on. It is stored under the status from before the shard was read: if the
        shard was written since, the index is out of date."""
        store_index(self.index_places(shard), index, self.statuses[shard])

    def index_places(self, shard: int) -> list[Path]:
        """Where its index may be stored, the best place first."""
        return index_places(self.paths[shard], self.caption_key)

    def _open(self, shard: int) -> int:
        mark_copy_used(self.paths[shard])
        return os.open(self.paths[shard], os.O_RDONLY)

    def __len__(self) -> int:
        return len(self.joined.rows)

    def __getitem__(self, id: int) -> Sample:
        self.check_id(id)
        image_block, image_size, caption_block, caption_size, kind, label = self.joined.rows[id].item()
        shard = self.joined.shard_of(id)
        image = self._read(shard, image_block, image_size)
        self._check_unchanged(shard)
        if kind == NO_CAPTION and label == NO_LABEL:
            raise BadSample("caption is missing", self._where(shard, image_block))
        if kind == NO_CAPTION:
            return Sample(image, ())
        if caption_size > MOST_CAPTION_BYTES:
            raise BadSample("caption is too long", self._where(shard, caption_block))
        raw = self._read(shard, caption_block, caption_size)
        found = captions_of(raw, kind, self.caption_key)
        try:
            return Sample(image, usable_captions(found, ""))
        except BadSample as bad:
            hint = f" ({other_keys(raw)})" if kind == JSON_CAPTION and not found else ""
            raise BadSample(bad.reason, self._where(shard, caption_block) + hint) from None

    def where(self, id: int) -> str:
        """Shard and member of the image, for messages."""
        return self._where(self.joined.shard_of(id), int(self.joined.rows[id]["image_block"]))

    def caption_pieces(self) -> Iterator[Captions]:
        """Shard by shard, from the index files."""
        for shard in range(len(self.shards)):
            index = self.index(shard)
            yield Captions(index.captions, index.further)

    def labels(self) -> list[int] | None:
        """The class (`cls` member) of every id; None unless every sample has one."""
        labels = self.joined.rows["label"]
        return None if len(labels) == 0 or (labels == NO_LABEL).any() else labels.tolist()

    def describe_files(self) -> SourceFiles:
        return SourceFiles(len(self.paths), sum(path.stat().st_size for path in self.paths))

    def file_versions(self) -> Iterator[str]:
        return map(file_version, self.paths)

    def places(self) -> set[str]:
        return {str(path.resolve()) for path in self.paths}

    def shard_facts(self) -> ShardFacts:
        return ShardFacts(np.diff(self.joined.ends, prepend=0).tolist())

    def _read(self, shard: int, block: int, size: int) -> bytes:
        try:
            content = os.pread(self._file(shard), size, block * BLOCK)
        except OSError as error:
            raise self._unreadable(shard, error) from None
        if len(content) != size:
            self._check_unchanged(shard)
            raise BadSample("shard was shortened", f"{self.shards[shard]} at byte {block * BLOCK}")
        return content

    def _unreadable(self, shard: int, error: OSError) -> RunFailed:
        """It was there when it was indexed. Whatever keeps it from being read now may pass, and must not change the
        training data."""
        if error.errno == errno.ENOENT and is_packed(self.shards[shard]):
            return RunFailed(f"{self.shards[shard]}: its unpacked copy has gone from the cache; continue with --resume")
        remedy = "check the disk or the network it lies on, and the memory of this machine"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "allow more open files (ulimit -n 4096) or use fewer --data.workers"
        elif error.errno == errno.ENOENT:
            remedy = "it was there when the run began: put it back"
        elif error.errno in (errno.EACCES, errno.EPERM):
            remedy = "check its permissions"
        return RunFailed(
            f"{self.shards[shard]}: cannot be read ({error.strerror}); {remedy}, then continue with --resume"
        )

    def _check_unchanged(self, shard: int) -> None:
        """In a shard that was written again the index points to other bytes, and to captions of other images."""
        if not self.statuses:
            return
        try:
            status = os.fstat(self._file(shard))
        except OSError as error:
            raise self._unreadable(shard, error) from None
        if (status.st_size, status.st_mtime_ns) != self.statuses[shard]:
            raise RunFailed(
                f"{self.shards[shard]}: was written again while it was in use; let nobody change the data of a run, "
                "then start again (a run that has begun continues with --resume if its captions are still the same)"
            )

    def _file(self, shard: int) -> int:
        """Its descriptor: an open one, or a new one in place of those that were not used for longest."""
        key = (self._number, shard)
        if key in _open_files:
            _open_files.move_to_end(key)
            return _open_files[key]
        own = [other for other in _open_files if other[0] == self._number]
        for oldest in own[: max(0, len(own) - (self.most_open or OPEN_FILES) + 1)]:
            os.close(_open_files.pop(oldest))
        while len(_open_files) >= OPEN_FILES:
            os.close(_open_files.popitem(last=False)[1])
        try:
            _open_files[key] = self._open(shard)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not _open_files:
                raise
            close_files()  # other code of this process holds more than usual
            _open_files[key] = self._open(shard)
        return _open_files[key]

    def _where(self, shard: int, block: int) -> str:
        try:
            member = self._read(shard, block - 1, 100).split(b"\0")[0].decode(errors="backslashreplace")
        except BadSample:
            member = f"byte {block * BLOCK}"
        return f"{self.shards[shard]}: {member}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_in_process()
