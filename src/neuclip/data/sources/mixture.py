"""Several sources as one, each with a weight: how often per epoch its samples appear.

Weight w means w appearances per epoch. For a source of n samples, k = floor(w) of them are whole copies: every sample
appears k times. The rest, r = round((w - k) n) appearances per epoch, walks evenly through the source and goes on in
the next epoch where it stopped, so that after any number of epochs no sample of a source is more than one appearance
ahead of another: at weight 0.5 every sample comes once in two epochs. Ids are samples', not appearances': dense
over the sources in the order given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from neuclip.data.order import Order, key_of
from neuclip.data.sample import Fault, Sample
from neuclip.data.shard_order import remote_order
from neuclip.errors import AskedWrongly

if TYPE_CHECKING:
    from neuclip.data.source import Source

WEIGHTED = re.compile(r"(.+):([0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
COMMA_OUTSIDE_BRACES = re.compile(r",(?![^{}]*\})")  # shards/{0,1}.tar is one address
ONLY_A_HOST = re.compile(r"\w+://[^/]*")  # in http://host:8080 the number is a port


def split_address(address: str) -> list[tuple[str, Fraction]]:
    """`a.csv:2,shards:0.5` -> [("a.csv", 2), ("shards", 1/2)]; without a number the weight is 1."""
    parts = []
    for part in COMMA_OUTSIDE_BRACES.split(address):
        part = part.strip()
        match = WEIGHTED.fullmatch(part)
        plain = match is None or ONLY_A_HOST.fullmatch(match[1]) or Path(part).exists()
        name, weight = (part, "1") if match is None or plain else match.groups()
        if not name:
            raise AskedWrongly(
                f"{address}: a comma stands alone; give addresses between commas, such as a.csv:2,shards"
            )
        if Fraction(weight) == 0:
            raise AskedWrongly(f"{part}: weight 0 would never be seen; leave this source out")
        parts.append((name, Fraction(weight)))
    return parts


class Mixture:
    """Sources of any kinds end to end. Weights count in training only, where `order_of` reads them."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[Fraction]):
        self.name = "+".join(source.name for source in sources)
        self.sources = tuple(sources)
        self.weights = tuple(weights)
        self.faults: tuple[Fault, ...] = tuple(fault for source in sources for fault in source.faults)
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, id: int) -> Sample:
        if not 0 <= id < len(self):
            raise IndexError(f"sample {id} of {len(self)}")
        source, own_id = self._place(id)
        return source[own_id]

    def where(self, id: int) -> str:
        source, own_id = self._place(id)
        return source.where(own_id)

    def captions(self) -> list[str]:
        return [caption for source in self.sources for caption in source.captions()]

    def _place(self, id: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self._ends, id, side="right"))
        return self.sources[number], id - (int(self._ends[number - 1]) if number else 0)


def order_of(source: Source, seed: int) -> Order | WeightedOrder:
    """The order in which training sees a source: every sample once per epoch, in a mixture as often as its weight says.

    `order_of(source, seed).size` is the number of samples per epoch. Remote shards are mixed a few at a time.
    """
    if (remote := remote_order(source, seed)) is not None:
        return remote
    if isinstance(source, Mixture) and any(weight != 1 for weight in source.weights):
        return WeightedOrder([len(part) for part in source.sources], source.weights, seed)
    return Order(len(source), seed)


class WeightedOrder:
    """The endless order of a mixture: as `Order`, over appearances instead of samples; nothing is stored either.

    >>> WeightedOrder(sizes=[4, 6], weights=[Fraction(2), Fraction(1, 2)], seed=0).size  # 8 + 3
    11
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[Fraction], seed: int):
        self.about = f"all samples mixed, weights {', '.join(map(str, weights))} of {', '.join(map(str, sizes))}"
        self.parts = []
        first_id = first_appearance = 0
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
            part = _Part(number, size, weight, first_id, first_appearance, seed)
            self.parts.append(part)
            first_id += size
            first_appearance += part.appearances
        if first_appearance == 0:
            raise AskedWrongly("the weights of data.train leave no sample in an epoch; give larger weights")
        self.size = first_appearance
        self.order = Order(self.size, seed)

    def ids(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: the ids of the samples at positions start..start+count-1."""
        return self._ids_and_visits(start, count)[0]

    def epochs(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: at each position, how many times its sample could have appeared before.

        That is the epoch where the weight is at most 1. Where it is more, each copy has a number of its own, and so
        a crop and a draw of the caption of its own.
        """
        return self._ids_and_visits(start, count)[1]

    def _ids_and_visits(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        appearances, epochs = self.order.ids(start, count), self.order.epochs(start, count)
        ids, visits = np.empty_like(appearances), np.empty_like(appearances)
        for part in self.parts:
            mine = (appearances >= part.first) & (appearances < part.first + part.appearances)
            ids[mine], visits[mine] = part.ids_and_visits(appearances[mine], epochs[mine])
        return ids, visits


class _Part:
    """One source of a mixture: its appearances in an epoch are first..first+appearances-1."""

    def __init__(self, number: int, size: int, weight: Fraction, first_id: int, first: int, seed: int):
        self.size, self.first_id, self.first = size, first_id, first
        self.copies = math.floor(weight)
        self.rest = math.floor((weight - self.copies) * size + Fraction(1, 2))
        self.appearances = self.copies * size + self.rest
        self.visits = self.copies + (1 if self.rest else 0)  # per epoch and sample, at most
        # A step of about the golden section of the size, without a common divisor, visits all before it repeats any
        # and leaves no stretch of the source out for long; where it begins depends on the seed.
        self.step = next(step for step in range(max(1, round(size * 0.618)), 2 * size + 2) if math.gcd(step, size) == 1)
        self.begin = int(key_of(seed, np.array([number]))[0] % np.uint64(size))

    def ids_and_visits(self, appearances: np.ndarray, epochs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        own = appearances - self.first
        copy, place = own // self.size, own % self.size
        walked = (self.begin + epochs * self.rest + place) % self.size * self.step % self.size
        return self.first_id + np.where(copy < self.copies, place, walked), epochs * self.visits + copy
