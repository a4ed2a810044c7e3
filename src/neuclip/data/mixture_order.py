"""The order of several sources with weights: each in its own endless order, and all through each other.

Weight w means w appearances per epoch: of a source of n samples an epoch takes round(w n), and goes on in the source's
own order where the last epoch stopped. So at weight 2 every sample appears twice per epoch, at 0.5 once in two epochs,
and no sample of a source is ever more than one appearance ahead of another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from neuclip.data.mixture import Mixture
from neuclip.data.order import GOLDEN, MASK, Order, key_of, mix
from neuclip.data.shard_order import SHARDS_TOGETHER, FetchingOrder, check_cache
from neuclip.data.tar.remote_source import RemoteTarSource
from neuclip.errors import UserError

if TYPE_CHECKING:
    from neuclip.data.source import Source

STRETCH = 4096  # positions, about: in each, every source has its share


def order_of(source: Source, seed: int) -> Order:
    """The order in which training sees a source: every sample once per epoch, in a mixture as often as its weight says.

    `order_of(source, seed).size` is the number of samples per epoch. Remote shards are mixed a few at a time.
    """
    if not isinstance(source, Mixture):
        check_cache([source], SHARDS_TOGETHER)
        return _order_of_part(source, seed)
    if all(weight == 1 for weight in source.weights) and not source.fetches:
        return Order(len(source), seed)
    check_cache(source.sources, SHARDS_TOGETHER)
    # Sources of equal size must not be shuffled alike.
    seeds = mix(key_of(seed, np.arange(len(source.sources)))).tolist()
    orders = [_order_of_part(part, own_seed) for part, own_seed in zip(source.sources, seeds, strict=True)]
    return MixtureOrder(orders, source.weights, seed)


def _order_of_part(source: Source, seed: int) -> Order:
    return FetchingOrder(source, seed) if isinstance(source, RemoteTarSource) else Order(len(source), seed)


class MixtureOrder(Order):
    """The endless order of a mixture, over appearances instead of samples. Ids are dense over the sources as given.

    An epoch is cut into stretches. How often each source appears up to the end of a stretch is a matter of rounding;
    who comes when within it, of a shuffle. So any window is found without walking there, and nothing is stored.

    >>> orders = [Order(4, seed=0), Order(6, seed=1)]
    >>> MixtureOrder(orders, weights=[Fraction(2), Fraction(1, 2)], seed=0).size  # 8 + 3
    11
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[Fraction], seed: int):
        self.orders = tuple(orders)
        self.appearances = [
            math.floor(weight * order.size + Fraction(1, 2)) for order, weight in zip(orders, weights, strict=True)
        ]
        self.size = sum(self.appearances)
        if self.size == 0:
            raise UserError("the weights of data.train leave no sample in an epoch; give larger weights")
        self.seed = seed
        self.first_ids = np.cumsum([0, *(order.size for order in orders)])
        stretch = max(STRETCH, 2 * len(orders) ** 2)  # so long that rounding never asks too much of the largest source
        self.stretches = -(-self.size // stretch)
        self.largest = int(np.argmax(self.appearances))
        parts = (f"{weight} x {order.size:,} ({order.about})" for order, weight in zip(orders, weights, strict=True))
        self.about = f"sources by weight: {', '.join(parts)}"
        self._known = (-1, np.zeros(0, np.int64), np.zeros(0, np.int64))

    def ids(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: the ids of the samples at positions start..start+count-1."""
        parts, ranks = self._window(start, count)
        self._fetch_ahead(parts, ranks)
        ids = np.empty(count, dtype=np.int64)
        for number, order in enumerate(self.orders):
            mine = parts == number
            if mine.any():  # ranks of one source are consecutive
                ids[mine] = self.first_ids[number] + order.ids(int(ranks[mine][0]), int(mine.sum()))
        return ids

    def _fetch_ahead(self, parts: np.ndarray, ranks: np.ndarray) -> None:
        """The longest unused shards are evicted, and a part that stays in its group for long uses it all the same: what
        one part brings must push out only what is finished."""
        fetching = [
            (order, ranks[parts == n]) for n, order in enumerate(self.orders) if isinstance(order, FetchingOrder)
        ]
        entered = [order.enters(int(own[0])) for order, own in fetching if len(own)]
        if any(entered):
            for order, _ in fetching:
                order.source.cache.use(order.wanted)
            for order, _ in fetching:  # only now: what comes evicts
                order.source.cache.want(order.wanted)

    def epochs(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: at each position, how many times its sample appeared before.

        Each appearance so has a crop and a draw of the caption of its own.
        """
        parts, ranks = self._window(start, count)
        return ranks // np.array([order.size for order in self.orders])[parts]

    def _window(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """For each position its source, and which appearance of that source it is, since the first epoch."""
        found = []
        position, end = start, start + count
        while position < end:
            epoch, place = divmod(position, self.size)
            number = ((place + 1) * self.stretches - 1) // self.size  # the last one that begins here or before
            first, last = self._begin(number), self._begin(number + 1)
            taken = slice(place - first, min(place + end - position, last) - first)
            parts, ranks = self._stretch(epoch, number)
            found.append((parts[taken], ranks[taken]))
            position += taken.stop - taken.start
        empty = np.zeros(0, np.int64)
        return np.concatenate([empty, *(p for p, _ in found)]), np.concatenate([empty, *(r for _, r in found)])

    def _begin(self, stretch: int) -> int:
        return stretch * self.size // self.stretches

    def _stretch(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """As `_window`, of a whole stretch; the last one asked for is kept."""
        key = epoch * self.stretches + number
        if self._known[0] != key:
            before, after = self._taken(self._begin(number)), self._taken(self._begin(number + 1))
            shares = after - before
            places = Order(int(shares.sum()), self._seed_of(key)).ids(0, int(shares.sum()))
            parts = np.repeat(np.arange(len(shares)), shares)[places]
            ranks = np.empty_like(parts)
            for part, first in enumerate(before + epoch * np.array(self.appearances)):
                ranks[parts == part] = first + np.arange(shares[part])
            self._known = (key, parts, ranks)
        return self._known[1:]

    def _taken(self, place: int) -> np.ndarray:
        """How often each source appears before this place of an epoch: its share, rounded down; the largest source
        makes up the difference."""
        taken = [appearances * place // self.size for appearances in self.appearances]
        taken[self.largest] += place - sum(taken)
        return np.array(taken)

    def _seed_of(self, stretch: int) -> int:
        return int(mix(key_of(self.seed, np.array([stretch])) + np.uint64(GOLDEN & MASK))[0])
