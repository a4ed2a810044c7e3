"""Bad samples: what stands in for them, and the list of them that a run keeps."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np

from neuclip.data.sample import Batch, Fault
from neuclip.data.source import Source
from neuclip.errors import RunFailed
from neuclip.records import append_line

TRIES = 100  # so many bad samples in a row mean that the data cannot be read at all
MERGED_FROM = 10_000  # ids; fewer stay a set
FIRST_CHECK = 100  # samples; before that a share says little


def stand_ins(id: int, size: int) -> list[int]:
    """Who may take a bad sample's place: the samples after it in source order, from the start again after the last."""
    return [(id + step) % size for step in range(1, min(TRIES, size - 1) + 1)]


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
    stops. A sample that is met again in a later epoch counts again on both sides, so the share stays that of the data.

    >>> log = FaultLog(RunFolder("runs/x").skipped, limit=0.05)
    >>> log.note(batch)
    >>> log.counts  # Counter({'picture does not decode': 3, 'caption is empty': 1})
    """

    def __init__(self, path: Path, limit: float):
        self.path = path
        self.limit = limit
        self.read = 0
        self.bad = 0
        self.counts: Counter[str] = Counter()  # different bad samples by reason, those of earlier parts of the run too
        self._known = _Ids()
        self._known_places: set[str] = set()  # of what has no id; a source lists few of them
        if path.exists():
            self._read_back()

    def _read_back(self) -> None:
        whole = 0
        with self.path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    record = json.loads(line)
                    self._remember(Fault(record["id"], record["reason"], record["where"], record.get("times", 1)))
                    whole += len(line)
        if whole < self.path.stat().st_size:
            os.truncate(self.path, whole)  # a line that a kill cut off would swallow the next one

    def note(self, batch: Batch) -> None:
        """Count a batch's samples, list its new faults. Raises RunFailed when too many samples are bad."""
        self.read += len(batch.ids)
        self.bad += len(batch.faults)
        for fault in batch.faults:
            self._append(fault)
        chance = 3 * math.sqrt(self.limit * (1 - self.limit) * self.read)
        enough = self.read >= FIRST_CHECK or self.limit == 0
        if enough and self.bad > self.limit * self.read + chance:
            raise RunFailed(self._too_many())

    def note_source(self, source: Source) -> None:
        """List what never became a sample: it has no id and takes no part in the share."""
        for fault in source.faults:
            self._append(fault)

    def _append(self, fault: Fault) -> None:
        if self._remember(fault):
            append_line(self.path, fault._asdict())

    def _remember(self, fault: Fault) -> bool:
        """Whether it is new. Samples are told apart by id, what has no id by reason and place."""
        if fault.id >= 0:
            new = self._known.add(fault.id)
        else:
            place = f"{fault.reason}, {fault.where}"
            new = place not in self._known_places
            self._known_places.add(place)
        if not new:
            return False
        self.counts[fault.reason] += fault.times
        return True

    def _too_many(self) -> str:
        reason, count = self.counts.most_common(1)[0]
        return (
            f"{self.bad:,} of {self.read:,} samples read are bad ({self.bad / self.read:.1%}, data.max_bad_share is "
            f"{self.limit:.1%}), most often: {reason} ({count:,}); all are listed in {self.path}; "
            "repair the data or raise --data.max_bad_share"
        )
