"""Bad samples: what replaces them, and the list of them that a run keeps."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from neuclip.data.sample import Batch, Fault
from neuclip.data.source import Source
from neuclip.errors import RunFailed
from neuclip.records import HELD_OUT, append_lines, read_lines, write_text_safely

TRIES = 100  # so many bad samples in a row mean that the data cannot be read at all
MERGED_FROM = 10_000  # ids; fewer stay a set
FIRST_CHECK = 100  # samples; before that a share says little


def replacements(id: int, size: int) -> list[int]:
    """The candidates for a bad sample's place: those after it in source order, from the start again after the last."""
    return [(id + step) % size for step in range(1, min(TRIES, size - 1) + 1)]


def too_many(bad: float, read: int, limit: float) -> bool:
    """Whether the share of bad ones is above the limit by more than chance, once there are enough for a share."""
    chance = 3 * math.sqrt(limit * (1 - limit) * read)
    return (read >= FIRST_CHECK or limit == 0) and bad > limit * read + chance


def forget_unindexed(path: Path) -> None:
    """Before a run continues. What could not be indexed is listed anew: files may be repaired, or lie elsewhere."""
    kept = [record for record in read_lines(path) if record["id"] >= 0 or HELD_OUT in record]
    write_text_safely(path, "".join(json.dumps(record) + "\n" for record in kept))


def by_reason(faults: Iterable[Fault]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for fault in faults:
        counts[fault.reason] += fault.times
    return counts


def count_unindexed(source: Source) -> int:
    """How many pairs could not be indexed, at least: nobody knows what the rest of a cut-off shard held."""
    return sum(fault.times for fault in source.faults)


def describe_unindexed(source: Source) -> str:
    """Their reasons, and where the first one is."""
    reasons = ", ".join(f"{count:,} x {reason}" for reason, count in by_reason(source.faults).most_common())
    return f"{reasons}; first: {source.faults[0].where}"


def too_many_unindexed(source: Source, limit: float) -> str:
    """Why no run on this source is started; "" if one may be."""
    unindexed = count_unindexed(source)
    pairs = len(source) + unindexed
    if not too_many(unindexed, pairs, limit):
        return ""
    return (
        f"{unindexed:,} of {pairs:,} pairs (at least) could not be indexed ({unindexed / pairs:.1%}, "
        f"data.max_bad_share is {limit:.1%}): {describe_unindexed(source)}; repair those files or fetch them again, "
        "or raise --data.max_bad_share"
    )


def too_many_without_caption(source: Source, limit: float) -> str:
    """Why no run on this source is started, where its captions are counted; "" if one may be."""
    counts = source.caption_counts
    if not counts or not too_many(counts.without, counts.samples, limit):
        return ""
    return (
        f"{counts.without:,} of {counts.samples:,} samples have no caption ({counts.without / counts.samples:.1%}, "
        f"data.max_bad_share is {limit:.1%}); add captions (neuclip doctor names the first sample without), or raise "
        "--data.max_bad_share to train without these"
    )


class ReadingFailed(RunFailed):
    """Ends a run in the middle of a batch; `faults` are those found in the batch so far."""

    def __init__(self, message: str, faults: tuple[Fault, ...] = ()):
        super().__init__(message)
        self.faults = faults


class _Ids:
    """A set of ids in 8 bytes each: of a billion samples ten million may be bad."""

    def __init__(self) -> None:
        self._sorted = np.zeros(0, dtype=np.int64)
        self._newest: set[int] = set()

    def add(self, id: int) -> bool:
        """Whether it is new."""
        place = int(np.searchsorted(self._sorted, id))
        if id in self._newest or (place < len(self._sorted) and self._sorted[place] == id):
            return False
        self._newest.add(id)
        if len(self._newest) > max(MERGED_FROM, len(self._sorted) // 8):
            newest = np.fromiter(self._newest, dtype=np.int64, count=len(self._newest))
            self._sorted = np.union1d(self._sorted, newest)
            self._newest.clear()
        return True


class FaultLog:
    """`skipped.jsonl` of a run: each bad sample once, over resumes too; stops the run when too many are bad.

    The rule: bad samples read / samples read since this process started must not exceed `limit` by more than chance
    (three standard deviations of a count with that share), from 100 samples on; with a limit of 0 the first bad sample
    stops. A sample that is read again in a later epoch counts again on both sides: the share stays that of the data.

    >>> log = FaultLog(RunFolder("runs/x").skipped, limit=0.05)
    >>> log.note(batch)
    >>> log.counts  # Counter({'image does not decode': 3, 'caption is empty': 1})
    """

    def __init__(self, path: Path, limit: float):
        self.path = path
        self.limit = limit
        self.read = 0
        self.bad = 0
        self.counts: Counter[str] = Counter()  # different bad samples by reason, those of earlier parts of the run too
        self._first: dict[str, str] = {}  # place of each reason
        self._known = _Ids()
        if path.exists():
            self._read_back()

    def _read_back(self) -> None:
        whole = 0
        with self.path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    record = json.loads(line)
                    if HELD_OUT not in record:
                        self._remember(Fault(record["id"], record["reason"], record["where"], record.get("times", 1)))
                    whole += len(line)
        if whole < self.path.stat().st_size:
            os.truncate(self.path, whole)  # a line that a kill cut off would swallow the next one

    def note(self, batch: Batch) -> None:
        """Count a batch's samples, list its new faults. Raises RunFailed when too many samples are bad."""
        self.read += len(batch.ids)
        self.bad += len(batch.faults)
        self.add(batch.faults)
        if too_many(self.bad, self.read, self.limit):
            raise RunFailed(self._too_many())

    def note_source(self, source: Source) -> None:
        """List what could not be indexed, once at the start."""
        self.add(source.faults)

    def add(self, faults: Iterable[Fault]) -> None:
        """List those that are new."""
        append_lines(self.path, [fault._asdict() for fault in faults if self._remember(fault)])

    def _remember(self, fault: Fault) -> bool:
        """Whether it is new. What has no id is noted once, by `note_source`."""
        if fault.id >= 0 and not self._known.add(fault.id):
            return False
        self.counts[fault.reason] += fault.times
        self._first.setdefault(fault.reason, fault.where)
        return True

    def _too_many(self) -> str:
        reason, count = self.counts.most_common(1)[0]
        return (
            f"{self.bad:,} of {self.read:,} samples read are bad ({self.bad / self.read:.1%}, data.max_bad_share is "
            f"{self.limit:.1%}), most often: {reason} ({count:,}, first: {self._first[reason]}); all are listed in "
            f"{self.path}; repair the data, or raise --data.max_bad_share and continue with --resume"
        )
