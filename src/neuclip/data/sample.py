"""What travels through the data layer: one pair as bytes, and one batch as tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

LISTED = 10  # places per shard or file and reason; what more of them there are is counted with the last


@dataclass(frozen=True)
class Sample:
    """One pair as it lies in its source."""

    image: bytes
    captions: tuple[str, ...]  # none only where a class label stands in its stead (zero-shot data)


class Fault(NamedTuple):
    """A sample that could not be used: it keeps its id and its place, a stand-in takes its place in the batch."""

    id: int  # -1: never became a sample (no image, cut-off shard), so it has no id
    reason: str  # a short phrase, the same for the same kind of fault, so that it can be counted
    where: str  # shard and member, or file and row
    times: int = 1  # how many are lost there


class UnindexedFaults:
    """What never became a sample, so that it has no id: counted by reason, the first places of each reason listed.

    >>> lost = UnindexedFaults()
    >>> for name in names_without_a_image: lost.note("no image", name)
    >>> lost.faults()  # (Fault(-1, "no image", "a.txt", 1), Fault(-1, "no image", "b.txt and 6 more", 7))
    """

    def __init__(self, listed: int = LISTED) -> None:
        self._most = listed
        self._listed: dict[str, dict[str, int]] = {}  # reason, place, times
        self._more: Counter[str] = Counter()

    def note(self, reason: str, where: str, times: int = 1) -> None:
        places = self._listed.setdefault(reason, {})
        if where in places or len(places) < self._most:
            places[where] = places.get(where, 0) + times
        else:
            self._more[reason] += times

    def faults(self) -> tuple[Fault, ...]:
        found = []
        for reason, places in self._listed.items():
            faults = [Fault(-1, reason, where, times) for where, times in places.items()]
            if more := self._more[reason]:
                where, times = faults[-1].where, faults[-1].times
                faults[-1] = Fault(-1, reason, f"{where} and {more} more", times + more)
            found += faults
        return tuple(found)


def shortened(name: str, most: int = 200) -> str:
    """A name for messages. What takes the place of a name may be a whole image in base64, or a page of text."""
    return name if len(name) <= most else f"{name[: most - 33]}... ({len(name):,} letters)"


class BadSample(Exception):
    """Raised by a source, or by decoding, for a sample that cannot be had: `BadSample("caption is empty", where)`."""

    def __init__(self, reason: str, where: str):
        super().__init__(reason, where)
        self.reason = reason
        self.where = where


class Batch(NamedTuple):
    """The pairs of one step, or of one process's share of it."""

    images: Tensor  # (b, 3, H, W)
    tokens: Tensor  # (b, L)
    ids: Tensor  # (b,) int64
    faults: tuple[Fault, ...]
