"""Counts and lists bad samples, and decides when there are too many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from neuclip.data.source import CaptionCounts, Fault, Source
from neuclip.errors import RunFailed
from neuclip.files import reading
from neuclip.records import REMEDY, append_lines, read_lines, write_lines

LISTED = 10  # faults listed per reason; further ones are counted with the last
FIRST_CHECK = 100  # samples; the share of fewer says little


def too_many(bad: float, read: int, limit: float) -> bool:
    """Whether the share of bad samples exceeds the limit by more than chance; False for fewer than FIRST_CHECK, unless
    the limit is 0."""
    chance = 3 * math.sqrt(limit * (1 - limit) * read)
    return (read >= FIRST_CHECK or limit == 0) and bad > limit * read + chance


def list_faults(unindexed: Iterable[tuple[str, str] | tuple[str, str, int]], most: int = LISTED) -> tuple[Fault, ...]:
    """The faults of samples that could not be indexed, each given as (reason, where) or (reason, where, times). At most
    `most` are listed per reason; the last of them includes all others of that reason.

    >>> list_faults([("no image", "a"), ("no image", "b"), ("no image", "c")], most=2)[-1].where
    'b and 1 more'
    """
    groups: dict[str, list[Fault]] = {}
    more: Counter[str] = Counter()
    for reason, where, *times in unindexed:
        listed = groups.setdefault(reason, [])
        number = times[0] if times else 1
        if len(listed) < most:
            listed.append(Fault(-1, reason, where, number))
        else:
            more[reason] += number
    for reason, number in more.items():
        last = groups[reason][-1]
        groups[reason][-1] = Fault(-1, reason, f"{last.where} and {number:,} more", last.times + number)
    return tuple(fault for listed in groups.values() for fault in listed)


def by_reason(faults: Iterable[Fault]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for fault in faults:
        counts[fault.reason] += fault.times
    return counts


def count_unindexed(source: Source) -> int:
    """The number of pairs that could not be indexed. It is a lower bound: how many pairs the missing part of a cut-off
    shard had is unknown."""
    return sum(fault.times for fault in source.faults)


def describe_unindexed(source: Source) -> str:
    """The reasons why pairs could not be indexed, and where the first one is."""
    reasons = ", ".join(f"{count:,} x {reason}" for reason, count in by_reason(source.faults).most_common())
    return f"{reasons}; first: {source.faults[0].where}"


def refuse_bad_source(source: Source, limit: float, counts: CaptionCounts | None = None) -> None:
    """Raise RunFailed if too many pairs could not be indexed or, given `counts`, have no caption."""
    unindexed = count_unindexed(source)
    pairs = len(source) + unindexed
    if too_many(unindexed, pairs, limit):
        raise RunFailed(
            f"{unindexed:,} of {pairs:,} pairs (at least) could not be indexed ({unindexed / pairs:.1%}, "
            f"data.max_bad_share is {limit:.1%}): {describe_unindexed(source)}; repair those files, get them again, "
            "or raise --data.max_bad_share"
        )
    if counts and too_many(counts.without, counts.samples, limit):
        raise RunFailed(
            f"{counts.without:,} of {counts.samples:,} samples have no caption ({counts.without / counts.samples:.1%}, "
            f"data.max_bad_share is {limit:.1%}); add captions (neuclip doctor names the first sample without one), "
            "or raise --data.max_bad_share to train without these samples"
        )


class FaultLog:
    """The `skipped.jsonl` of a run, which lists each bad sample once, even over resumes. Without a path it only counts.

    The rule: the share of bad samples among those read since this process started must not exceed `limit` by more than
    chance (three standard deviations of a count with that share), from 100 samples on. With a limit of 0, the first bad
    sample stops the run. A sample that is read again in a later epoch counts again as read and, if bad, as bad: the
    share remains that of the data.

    >>> log = FaultLog(RunFolder("runs/x").skipped, limit=0.05)                                     # doctest: +SKIP
    >>> log.add(batch.faults); log.counts                                                           # doctest: +SKIP
    Counter({'image does not decode': 3, 'caption is empty': 1})
    """

    def __init__(self, path: Path | None, limit: float):
        self.path, self.limit = path, limit
        self.read = self.bad = 0
        self.counts: Counter[str] = Counter()  # distinct bad samples by reason, since the run began
        self._first: dict[str, str] = {}  # reason -> where its first bad sample is
        self._known: set[int] = set()
        if path and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        """Read the faults that were listed before the run was resumed."""
        with reading(path, REMEDY):
            faults = [Fault(**record) for record in read_lines(path)]
            for fault in faults:
                self._is_new(fault)
        write_lines(path, [fault._asdict() for fault in faults])  # without a line that a kill cut off

    def add(self, faults: Iterable[Fault]) -> None:
        """Append those faults that are not listed yet."""
        new = [fault._asdict() for fault in faults if self._is_new(fault)]
        if self.path and new:
            append_lines(self.path, new)

    def _is_new(self, fault: Fault) -> bool:
        """Count a fault unless its sample is known already. Faults without an id are added only once, when a run
        starts."""
        if fault.id in self._known:
            return False
        if fault.id >= 0:
            self._known.add(fault.id)
        self.counts[fault.reason] += fault.times
        self._first.setdefault(fault.reason, fault.where)
        return True

    def note(self, read: int, bad: int) -> str:
        """Count samples. Returns the reason why the run must stop if too many are bad, else ''."""
        self.read += read
        self.bad += bad
        if not too_many(self.bad, self.read, self.limit):
            return ""
        reason, count = self.counts.most_common(1)[0]
        return (
            f"{self.bad:,} of {self.read:,} samples read are bad ({self.bad / self.read:.1%}, data.max_bad_share is "
            f"{self.limit:.1%}), most often: {reason} ({count:,}, first: {self._first[reason]}); all are listed in "
            f"{self.path or 'skipped.jsonl'}; repair the data, or raise --data.max_bad_share and continue with --resume"
        )
