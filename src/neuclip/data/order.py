"""Which sample comes when: a pure function of (seed, epoch, position), so one count is all there is to save."""

from __future__ import annotations

import numpy as np

ROUNDS = 8  # six already mix well; eight cost 0.1 ms for a window of 1024
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def mix(values: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, elementwise: every input bit moves about half of the output bits (the splitmix64 finalizer)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def key_of(seed: int, epochs: np.ndarray) -> np.ndarray:
    """One uint64 key per entry of `epochs`; different for every (seed, epoch)."""
    start = mix(np.array([(seed + GOLDEN) & MASK], dtype=np.uint64))
    return mix(start + epochs.astype(np.uint64) * np.uint64(GOLDEN))


def augmentation_seeds(seed: int, epochs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """(k,), (k,) -> (k,) uint64: what augmentation and caption choice of each (epoch, id) are seeded by."""
    # The extra constant keeps these apart from the keys that shuffle.
    return mix(key_of(seed ^ 0x5DEECE66D, epochs) + ids.astype(np.uint64) * np.uint64(GOLDEN))


class Order:
    """The endless order: epoch after epoch, each a fresh shuffle of 0..size-1 that holds every id exactly once.

    Nothing is stored: each position is pushed through a keyed Feistel network, so a billion samples cost no more
    memory than three, and any window can be had at once.

    >>> Order(size=5, seed=0).ids(start=0, count=10)  # two epochs
    """

    about = "all samples mixed"

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
        """(count,) int64: the ids at positions start..start+count-1; the window may straddle epochs."""
        positions = np.arange(start, start + count, dtype=np.int64)
        keys = key_of(self.seed, positions // self.size)
        values = self._permute((positions % self.size).astype(np.uint64), keys)
        # The network permutes the next power of two. Walking on from what falls outside until it is inside again
        # (fewer than 2 passes on average) leaves a permutation of 0..size-1.
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._permute(values[outside], keys[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _permute(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """A permutation of 0..2**bits-1 for each key: each half in turn is xored with a hash of the other."""
        low_mask, high_mask = np.uint64((1 << self.low_bits) - 1), np.uint64((1 << self.high_bits) - 1)
        low, high = values & low_mask, values >> np.uint64(self.low_bits)
        for number in range(0, ROUNDS, 2):
            low = low ^ (mix(high + keys + np.uint64(number * GOLDEN & MASK)) & low_mask)
            high = high ^ (mix(low + keys + np.uint64((number + 1) * GOLDEN & MASK)) & high_mask)
        return (high << np.uint64(self.low_bits)) | low


class SourceOrder(Order):
    """Every id once, as they lie in the source: the order of evaluation."""

    about = "as they lie"

    def __init__(self, size: int):
        self.size = size

    def epochs(self, start: int, count: int) -> np.ndarray:
        return np.zeros(len(self.ids(start, count)), dtype=np.int64)

    def ids(self, start: int, count: int) -> np.ndarray:
        """At most `count` ids: the last window is what is left."""
        return np.arange(start, min(start + count, self.size), dtype=np.int64)
