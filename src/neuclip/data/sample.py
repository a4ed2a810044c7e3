"""What travels through the data layer: one pair as bytes, and one batch as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One pair as it lies in its source."""

    image: bytes
    captions: tuple[str, ...]  # none only where a class label stands in its stead (zero-shot data)


class Fault(NamedTuple):
    """A sample that could not be used: it keeps its id and its place, a stand-in takes its place in the batch."""

    id: int  # -1: never became a sample (no picture, cut-off shard), so it has no id
    reason: str  # a short phrase, the same for the same kind of fault, so that it can be counted
    where: str  # shard and member, or file and row


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
