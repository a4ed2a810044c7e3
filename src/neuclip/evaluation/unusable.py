"""Samples of held-out sets that cannot be used: they are listed, and a set with too many of them is not measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from neuclip.data.faults import by_reason, count_unindexed
from neuclip.data.sample import Fault
from neuclip.data.source import Source
from neuclip.errors import RunFailed
from neuclip.records import HELD_OUT


class TooManyBad(RunFailed):
    """So many samples of a set are bad that a figure over the rest would say nothing about the set."""

    def __init__(self, source: Source, faults: Sequence[Fault], limit: float):
        counts = by_reason((*source.faults, *faults))
        reason, count = counts.most_common(1)[0]
        bad, total = counts.total(), len(source) + count_unindexed(source)
        self.faults = tuple(faults)
        self.reason = (
            f"{bad:,} of {total:,} samples cannot be used ({bad / total:.1%}, "
            f"data.max_bad_share is {limit:.1%}), most often: {reason} ({count:,})"
        )
        super().__init__(f"{source.name}: {self.reason}; repair the data")


def refuse_above(limit: float, source: Source, faults: Sequence[Fault]) -> None:
    """Raises TooManyBad. Each sample was read once: the share is exact. What never became a sample counts as bad."""
    lost = count_unindexed(source)
    if len(faults) + lost > limit * (len(source) + lost) or len(faults) == len(source):
        raise TooManyBad(source, faults, limit)


def list_faults(path: Path, faults: Mapping[str, Sequence[Fault]]) -> None:
    """Add the faults of each set to a run's skipped.jsonl, except those that earlier evaluations listed."""
    lines = [json.dumps(fault._asdict() | {HELD_OUT: name}) + "\n" for name, found in faults.items() for fault in found]
    if not lines:
        return
    with path.open("a+", encoding="utf-8") as file:
        file.seek(0)
        known = {line for line in file if f'"{HELD_OUT}": ' in line}
        file.writelines(line for line in lines if line not in known)
