"""What travels through the data layer: one pair as bytes, and one batch as tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

LISTED = 10  # places per shard or file and reason; further ones are counted with the last


@dataclass(frozen=True)
class Sample:
    """One pair as it lies in its source."""

    image: bytes
    captions: tuple[str, ...]  # none only where there is a class label instead (zero-shot data)


class Fault(NamedTuple):
    """A sample that could not be used: it keeps its id and its position, another one replaces it in the batch."""

    id: int  # -1: it could not be indexed (no image, cut-off shard) and has no id
    reason: str  # a short phrase, the same for the same kind of fault: reasons are counted
    where: str  # shard and member, or file and row
    times: int = 1  # how many are lost there


class UnindexedFaults:
    """What could not be indexed and has no id: counted by reason, with the first places of each reason.

    >>> unindexed = UnindexedFaults()
    >>> for name in names_without_an_image: unindexed.note("no image", name)
    >>> unindexed.faults()  # (Fault(-1, "no image", "a.txt", 1), Fault(-1, "no image", "b.txt and 6 more", 7))
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
        all_faults: list[Fault] = []
        for reason, places in self._listed.items():
            faults = [Fault(-1, reason, where, times) for where, times in places.items()]
            if more := self._more[reason]:
                where, times = faults[-1].where, faults[-1].times
                faults[-1] = Fault(-1, reason, f"{where} and {more} more", times + more)
            all_faults += faults
        return tuple(all_faults)


def shorten(name: str, most: int = 200) -> str:
    """A name for messages. A wrong table may give a whole image in base64 for a name, or a page of text."""
    return name if len(name) <= most else f"{name[: most - 33]}... ({len(name):,} letters)"


class BadSample(Exception):
    """Raised by a source, or by decoding, for an unusable sample: `BadSample("caption is empty", where)`."""

    def __init__(self, reason: str, where: str):
        super().__init__(reason, where)
        self.reason = reason
        self.where = where


class Batch(NamedTuple):
    """The pairs of one step, or of one rank's share of it."""

    images: Tensor  # (b, 3, H, W); or the features (b, width) of a locked trunk, where they are stored
    tokens: Tensor  # (b, L)
    ids: Tensor  # (b,) int64
    faults: tuple[Fault, ...]
    text_features: Tensor | None = None  # (b, width) of a locked trunk, where they are stored


class ImageBatch(NamedTuple):
    """Images to embed, with all their captions; those that could not be read are left out and named in `faults`."""

    images: Tensor  # (b, 3, H, W); (0,) where none could be read
    ids: Tensor  # (b,) int64
    captions: tuple[tuple[str, ...], ...]
    digests: tuple[bytes, ...]  # 16 bytes each, equal for images of equal bytes
    faults: tuple[Fault, ...]
