"""Many captions in a few arrays: a list of a hundred million Python strings would not fit into memory."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from neuclip.data.captions import stripped, usable_captions
from neuclip.data.sample import BadSample

PIECE = 100_000  # captions that are made Python's strings at a time
FURTHER = np.dtype([("number", "<i8"), ("hash", "S16")])


class Texts:
    """Many short texts in two arrays."""

    def __init__(self, bytes_: np.ndarray, ends: np.ndarray):
        self.bytes = bytes_  # uint8, all texts end to end as UTF-8
        self.ends = ends  # int64, where each text ends

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> Texts:
        joined, ends = bytearray(), array("q")
        for text in texts:
            joined += text
            ends.append(len(joined))
        return cls.joined(joined, ends)

    @classmethod
    def joined(cls, bytes_: bytearray, ends: array[int]) -> Texts:
        """Of both as they are, without a copy."""
        return cls(np.frombuffer(bytes_, dtype=np.uint8), np.frombuffer(ends, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> bytes:
        start = int(self.ends[number - 1]) if number else 0
        return self.bytes[start : int(self.ends[number])].tobytes()

    def between(self, first: int, last: int) -> list[bytes]:
        """Texts first..last-1; of many faster than one by one."""
        before = int(self.ends[first - 1]) if first else 0
        ends = [0, *(self.ends[first:last] - before).tolist()]
        together = self.bytes[before : before + ends[-1]].tobytes()
        return [together[start:end] for start, end in pairwise(ends)]

    def strings(self) -> list[str]:
        """All texts; what is not UTF-8 is empty."""
        return [text_or_nothing(text) for text in self.between(0, len(self))]


class Captions(NamedTuple):
    """The captions of consecutive samples, as far as they tell data sets apart (data/fingerprint.py)."""

    first: Texts  # of each sample, stripped; empty where it has none that can be used
    further: np.ndarray  # (k,) of FURTHER: of each sample with several its number here, and a hash of the others

    @classmethod
    def of(cls, found: Iterable[Iterable[str | bytes]]) -> Captions:
        """Of all that is found for each sample, usable or not.

        >>> Captions.of([["one"], [], ["two", "zwei"]]).first.strings()
        ['one', '', 'two']
        """
        further: list[tuple[int, bytes]] = []
        first = Texts.of(_first_captions(found, further))
        return cls(first, np.array(further, dtype=FURTHER))


def _first_captions(found: Iterable[Iterable[str | bytes]], further: list[tuple[int, bytes]]) -> Iterator[bytes]:
    """The first usable caption of each sample; `further` grows by the others."""
    for number, captions in enumerate(found):
        try:
            first, *others = usable_captions(captions, "")
        except BadSample:
            first, others = "", []
        if others:
            with_lengths = "".join(f"{len(text)}:{text}" for text in others)  # which say where one ends
            further.append((number, hashlib.sha256(with_lengths.encode()).digest()[:16]))
        yield first.encode()


def text_or_nothing(text: bytes) -> str:
    try:
        return stripped(text.decode())
    except UnicodeDecodeError:
        return ""
