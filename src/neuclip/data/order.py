"""The order of samples: a pure function of seed and position. A checkpoint stores only the position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUNDS = 8  # six already mix well; eight cost 0.1 ms for a window of 1024
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
SHARDS_TOGETHER = 16  # remote shards that are mixed at a time; changing it changes the order of every remote run


def mix(values: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, elementwise: every input bit moves about half of the output bits (the splitmix64 finalizer)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def epoch_keys(seed: int, epochs: np.ndarray) -> np.ndarray:
    """One uint64 key per entry of `epochs`; different for every (seed, epoch)."""
    start = mix(np.array([(seed + GOLDEN) & MASK], dtype=np.uint64))
    return mix(start + epochs.astype(np.uint64) * np.uint64(GOLDEN))


def augmentation_seeds(seed: int, epochs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """(k,), (k,) -> (k,) uint64: the seed for augmentation and choice of caption for each (epoch, id)."""
    # The extra constant makes these seeds independent of the keys that shuffle.
    return mix(epoch_keys(seed ^ 0x5DEECE66D, epochs) + ids.astype(np.uint64) * np.uint64(GOLDEN))


class Order:
    """The endless order: epoch after epoch, each a new shuffle of 0..size-1 that contains every id exactly once.

    Nothing is stored: each position goes through a keyed Feistel network. A billion samples need no more memory than
    three, and any window is computed directly.

    >>> Order(size=5, seed=0).ids(start=0, count=10)  # two epochs
    """

    description = "all samples mixed"  # stored in checkpoints: a resume with another kind of order is refused

    def __init__(self, size: int, seed: int):
        if size < 1:
            raise ValueError(f"an order needs at least one sample, not {size}")
        self.size = size
        self.seed = seed
        bits = max(2, (size - 1).bit_length())
        self.low_bits = bits // 2
        self.high_bits = bits - self.low_bits

    def epochs(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: the epoch of each position start..start+count-1."""
        return np.arange(start, start + count, dtype=np.int64) // self.size

    def ids(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: the ids at positions start..start+count-1; the window may span several epochs."""
        positions = np.arange(start, start + count, dtype=np.int64)
        keys = epoch_keys(self.seed, positions // self.size)
        values = self._permute((positions % self.size).astype(np.uint64), keys)
        # The network permutes 0..2**bits-1. Applying it again to values outside 0..size-1 until all are inside (fewer
        # than 2 passes on average) gives a permutation of 0..size-1.
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._permute(values[outside], keys[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def shards_ahead(self, position: int) -> list[int]:
        """The shards that are read from this position on; [] if all samples are mixed."""
        return []

    def _permute(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """A permutation of 0..2**bits-1 for each key: each half in turn is xored with a hash of the other."""
        low_mask, high_mask = np.uint64((1 << self.low_bits) - 1), np.uint64((1 << self.high_bits) - 1)
        low, high = values & low_mask, values >> np.uint64(self.low_bits)
        for number in range(0, ROUNDS, 2):
            low = low ^ (mix(high + keys + np.uint64(number * GOLDEN & MASK)) & low_mask)
            high = high ^ (mix(low + keys + np.uint64((number + 1) * GOLDEN & MASK)) & high_mask)
        return (high << np.uint64(self.low_bits)) | low


@dataclass(frozen=True)
class Group:
    """Shards that are mixed together. Their samples have the positions start..start+size-1 of the endless order."""

    epoch: int
    number: int
    shards: np.ndarray
    start: int
    size: int


class ShardOrder(Order):
    """The order of remote data: like Order, but at any time samples come from few shards, so few must be on disk.

    Each epoch shuffles the shards and splits them into groups of at most `together`, as equal as possible. The samples
    of a group are shuffled, and one group follows the other. The order is a function of the sizes of the shards, the
    seed and the position; it stores one number per shard.

    >>> ShardOrder(ends=[3, 5, 9], seed=0, together=2).ids(start=0, count=9)
    """

    def __init__(self, ends: Sequence[int] | np.ndarray, seed: int, together: int = SHARDS_TOGETHER):
        self.ends = np.asarray(ends, dtype=np.int64)
        super().__init__(int(self.ends[-1]), seed)
        self.sizes = np.diff(self.ends, prepend=0)
        groups = -(-len(self.ends) // together)
        self.cuts = np.arange(groups + 1) * len(self.ends) // groups
        self.shard_order = Order(len(self.ends), seed)
        digest = hashlib.sha256(self.ends.astype("<i8").tobytes()).hexdigest()[:8]
        self.description = f"{len(self.ends):,} shards ({digest}), {together} mixed at a time"
        self._last_epoch = (-1, np.zeros(0, np.int64), np.zeros(0, np.int64))

    def ids(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: the ids at positions start..start+count-1; the window may span several groups and epochs."""
        pieces = [np.zeros(0, np.int64)]
        position, end = start, start + count
        while position < end:
            group = self.group_at(position)
            first = position - group.start
            length = min(end - position, group.size - first)
            pieces.append(self._ids_of(group, first, length))
            position += length
        return np.concatenate(pieces)

    def group_at(self, position: int) -> Group:
        """The group that is read at this position."""
        epoch, place = divmod(position, self.size)
        shards, ends = self._shards_and_ends(epoch)
        number = int(np.searchsorted(ends, place, side="right"))
        start = int(ends[number - 1]) if number else 0
        members = shards[self.cuts[number] : self.cuts[number + 1]]
        return Group(epoch, number, members, epoch * self.size + start, int(ends[number]) - start)

    def shards_ahead(self, position: int) -> list[int]:
        """The shards of the group that is read at this position, then those of the next group."""
        group = self.group_at(position)
        after = self.group_at(group.start + group.size)
        return list(dict.fromkeys([*group.shards.tolist(), *after.shards.tolist()]))

    def _shards_and_ends(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order of shards, and the end of each group. The result for the latest epoch is cached."""
        if self._last_epoch[0] != epoch:
            shards = self.shard_order.ids(epoch * len(self.ends), len(self.ends))
            self._last_epoch = (epoch, shards, np.cumsum(self.sizes[shards])[self.cuts[1:] - 1])
        return self._last_epoch[1:]

    def _ids_of(self, group: Group, first: int, count: int) -> np.ndarray:
        key = epoch_keys(self.seed, np.array([group.epoch])) + np.uint64(GOLDEN * (group.number + 1) & MASK)
        places = Order(group.size, int(mix(key)[0])).ids(first, count)
        ends = np.cumsum(self.sizes[group.shards])
        which = np.searchsorted(ends, places, side="right")
        # The position in the group, minus the samples of its earlier shards, plus the first id of this shard.
        return places - ends[which] + self.ends[group.shards[which]]


class WeightedOrder(Order):
    """The order of sources with weights: each sample of a source with weight w appears w times per epoch.

    `appearances` is an order over all appearances. Each appearance of a sample counts as another epoch of it, with
    another crop and choice of caption. `shards` maps each shard of `appearances` to its shard in the sources.

    >>> WeightedOrder(Order(14, seed=0), sizes=[4, 6], weights=[2, 1]).size  # 8 + 6
    14
    """

    def __init__(
        self, appearances: Order, sizes: Sequence[int], weights: Sequence[int], shards: np.ndarray | None = None
    ):
        self.appearances, self.size, self.seed, self.shards = appearances, appearances.size, appearances.seed, shards
        self.sizes, self.weights = np.array(sizes), np.array(weights)
        parts = ", ".join(f"{weight} x {size:,}" for size, weight in zip(sizes, weights, strict=True))
        self.description = f"{appearances.description}, sources {parts}"
        self._first_ids = np.cumsum(self.sizes) - self.sizes
        self._ends = np.cumsum(self.sizes * self.weights)

    def ids(self, start: int, count: int) -> np.ndarray:
        part, place = self._places(start, count)
        return self._first_ids[part] + place % self.sizes[part]

    def epochs(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: at each position, how many times its sample has appeared before."""
        part, place = self._places(start, count)
        return self.appearances.epochs(start, count) * self.weights[part] + place // self.sizes[part]

    def shards_ahead(self, position: int) -> list[int]:
        ahead = self.appearances.shards_ahead(position)
        return ahead if self.shards is None else list(dict.fromkeys(self.shards[ahead].tolist()))

    def _places(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The source at each position, and the number of the appearance among those of that source in an epoch."""
        drawn = self.appearances.ids(start, count)
        part = np.searchsorted(self._ends, drawn, side="right")
        return part, drawn - (self._ends - self.sizes * self.weights)[part]
