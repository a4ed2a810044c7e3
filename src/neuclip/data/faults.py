"""Bad samples: what stands in for them, and the list of them that a run keeps."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

from neuclip.data.sample import Batch, Fault
from neuclip.data.source import Source
from neuclip.errors import RunFailed
from neuclip.records import append_line, read_lines, write_text_safely

TRIES = 100  # so many bad samples in a row mean that the data cannot be read at all
FIRST_CHECK = 100  # samples; before that a share says little


def stand_ins(id: int, size: int) -> list[int]:
    """Who may take a bad sample's place: the samples after it in source order, from the start again after the last."""
    return [(id + step) % size for step in range(1, min(TRIES, size - 1) + 1)]


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
        self._known: set[tuple[int, str]] = set()
        records = read_lines(path)
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            # A line that a kill cut off would swallow the next one.
            write_text_safely(path, "".join(json.dumps(record) + "\n" for record in records))
        for record in records:
            self._remember(Fault(record["id"], record["reason"], record["where"], record.get("times", 1)))

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
        key = (fault.id, f"{fault.reason}, {fault.where}" if fault.id < 0 else "")
        if key in self._known:
            return False
        self._known.add(key)
        self.counts[fault.reason] += fault.times
        return True

    def _too_many(self) -> str:
        reason, count = self.counts.most_common(1)[0]
        return (
            f"{self.bad:,} of {self.read:,} samples read are bad ({self.bad / self.read:.1%}, data.max_bad_share is "
            f"{self.limit:.1%}), most often: {reason} ({count:,}); all are listed in {self.path}; "
            "repair the data or raise --data.max_bad_share"
        )
