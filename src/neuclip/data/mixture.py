"""Several sources as one, and the order in which training reads them.

Weight w means w appearances per epoch: of a source of n samples an epoch takes round(w n), and continues in the
source's own order where the last epoch stopped. At weight 2 every sample appears twice per epoch, at 0.5 once in two
epochs, and no sample of a source is ever more than one appearance ahead of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from neuclip.data.captions import Captions
from neuclip.data.order import GOLDEN, SHARDS_TOGETHER, Order, epoch_keys, mix
from neuclip.data.sample import Sample
from neuclip.data.source import Source, SourceFiles
from neuclip.data.tar.cache import check_cache_size
from neuclip.errors import UserError

STRETCH = 4096  # positions, about: in each, every source has its share


class Mixture(Source):
    """Sources of any kinds end to end: the ids of each follow those of the one before. Weights count in training."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[Fraction]):
        self.sources = tuple(sources)
        self.weights = tuple(weights)
        self.name = "+".join(source.name for source in sources)
        self.faults = tuple(fault for source in sources for fault in source.faults)
        self.fetches = any(source.fetches for source in sources)
        self.captions_are_files = any(source.captions_are_files for source in sources)
        self.texts_are_captions = any(source.texts_are_captions for source in sources)
        self.images_in_rows = any(source.images_in_rows for source in sources)
        self._ends = np.cumsum([len(source) for source in sources])

    @property
    def kind(self) -> str:  # type: ignore[override]  # an attribute of the other sources
        return "+".join(dict.fromkeys(source.kind for source in self.sources))

    @property
    def parts(self) -> tuple[Source, ...]:
        return self.sources

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, id: int) -> Sample:
        self.check_id(id)
        source, own_id = self._source_and_id(id)
        return source[own_id]

    def where(self, id: int) -> str:
        source, own_id = self._source_and_id(id)
        return source.where(own_id)

    def caption_pieces(self) -> Iterator[Captions]:
        for source in self.sources:
            yield from source.caption_pieces()

    def order(self, seed: int) -> Order:
        """Every sample as often per epoch as its weight says; `size` is the number of appearances per epoch."""
        if all(weight == 1 for weight in self.weights) and not self.fetches:
            return Order(len(self), seed)
        check_cache_size(self.sources, SHARDS_TOGETHER)
        # Sources of equal size must not be shuffled alike.
        seeds = mix(epoch_keys(seed, np.arange(len(self.sources)))).tolist()
        orders = [source.order(own_seed) for source, own_seed in zip(self.sources, seeds, strict=True)]
        return MixtureOrder(orders, self.weights, seed)

    def prefetch(self, order: Order, start: int, count: int) -> None:
        """The download of one source evicts what was unused for longest. Before that, every source marks what it still
        needs: one that stays with the same shards for long would lose them otherwise."""
        if not isinstance(order, MixtureOrder):
            return
        positions = order.positions_of_parts(start)
        for number, position in positions.items():
            self.sources[number].mark_needed(order.orders[number], position)
        for number, position in positions.items():
            self.sources[number].prefetch(order.orders[number], position, count)

    def check_images(self) -> None:
        for source in self.sources:
            source.check_images()

    def describe_files(self) -> SourceFiles:
        files = [source.describe_files() for source in self.sources]
        sizes = [one.bytes for one in files if one.bytes is not None]
        return SourceFiles(sum(one.number for one in files), sum(sizes) if len(sizes) == len(files) else None)

    def places(self) -> set[str]:
        return set().union(*(source.places() for source in self.sources))

    def image_keys(self) -> np.ndarray | None:
        """Those of its sources; None if the images of one must be read to know."""
        keys = [source.image_keys() for source in self.sources]
        if self.images_in_rows or all(key is None for key in keys):
            return None
        own = mix(np.arange(len(self), dtype=np.uint64))  # for sources whose pairs all have an image of their own
        parts = zip(keys, np.split(own, self._ends[:-1]), strict=True)
        return np.concatenate([unique if key is None else key for key, unique in parts])

    def _source_and_id(self, id: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self._ends, id, side="right"))
        return self.sources[number], id - (int(self._ends[number - 1]) if number else 0)


class MixtureOrder(Order):
    """The endless order of a mixture, over appearances instead of samples. Ids are dense over the sources as given.

    An epoch is cut into stretches. Rounding decides how often each source appears up to the end of a stretch, a shuffle
    decides which comes when within it. Any window is computed without walking there, and nothing is stored.

    >>> orders = [Order(4, seed=0), Order(6, seed=1)]
    >>> MixtureOrder(orders, weights=[Fraction(2), Fraction(1, 2)], seed=0).size  # 8 + 3
    11
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[Fraction], seed: int):
        self.orders = tuple(orders)
        self.appearances = np.array(
            [math.floor(weight * order.size + Fraction(1, 2)) for order, weight in zip(orders, weights, strict=True)]
        )
        if self.appearances.sum() == 0:
            raise UserError("the weights of data.train leave no sample in an epoch; give larger weights")
        super().__init__(int(self.appearances.sum()), seed)
        self.first_ids = np.cumsum([0, *(order.size for order in orders)])
        stretch = max(STRETCH, 2 * len(orders) ** 2)  # long enough that rounding never asks too much of the largest
        self.stretches = -(-self.size // stretch)
        self.largest = int(np.argmax(self.appearances))
        parts = (f"{weight} x {order.size:,} ({order.about})" for order, weight in zip(orders, weights, strict=True))
        self.about = f"sources by weight: {', '.join(parts)}"
        self._last_stretch = (-1, np.zeros(0, np.int64), np.zeros(0, np.int64))

    def ids(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: the ids of the samples at positions start..start+count-1."""
        parts, ranks = self._window(start, count)
        ids = np.empty(count, dtype=np.int64)
        for number, order in enumerate(self.orders):
            own = parts == number
            if own.any():  # ranks of one source are consecutive
                ids[own] = self.first_ids[number] + order.ids(int(ranks[own][0]), int(own.sum()))
        return ids

    def epochs(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: at each position, how many times its sample appeared before.

        Every appearance has its own crop and its own draw of the caption.
        """
        parts, ranks = self._window(start, count)
        return ranks // np.array([order.size for order in self.orders])[parts]

    def positions_of_parts(self, position: int) -> dict[int, int]:
        """By the number of the source: where it is in its own order when the mixture is at this position. Sources that
        never appear are left out."""
        epoch, stretch, place = self._stretch_at(position)
        parts, _ = self._stretch(epoch, stretch)
        here = np.bincount(parts[:place], minlength=len(self.orders))
        before = epoch * self.appearances + self._appearances_before(self._begin(stretch)) + here
        return {number: int(before[number]) for number in np.flatnonzero(self.appearances).tolist()}

    def _window(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """For each position its source, and which appearance of that source it is, since the first epoch."""
        parts, ranks = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        position, end = start, start + count
        while position < end:
            epoch, stretch, place = self._stretch_at(position)
            piece = slice(place, place + end - position)
            stretch_parts, stretch_ranks = self._stretch(epoch, stretch)
            parts.append(stretch_parts[piece])
            ranks.append(stretch_ranks[piece])
            position += len(parts[-1])
        return np.concatenate(parts), np.concatenate(ranks)

    def _stretch_at(self, position: int) -> tuple[int, int, int]:
        """Epoch, stretch of the epoch, and place in the stretch."""
        epoch, place = divmod(position, self.size)
        stretch = ((place + 1) * self.stretches - 1) // self.size  # the last one that begins here or before
        return epoch, stretch, place - self._begin(stretch)

    def _begin(self, stretch: int) -> int:
        return stretch * self.size // self.stretches

    def _stretch(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """As `_window`, of a whole stretch; the last one asked for is kept."""
        key = epoch * self.stretches + number
        if self._last_stretch[0] != key:
            before = self._appearances_before(self._begin(number))
            shares = self._appearances_before(self._begin(number + 1)) - before
            seed = int(mix(epoch_keys(self.seed, np.array([key])) + np.uint64(GOLDEN))[0])
            places = Order(int(shares.sum()), seed).ids(0, int(shares.sum()))
            parts = np.repeat(np.arange(len(shares)), shares)[places]
            ranks = np.empty_like(parts)
            for part, first in enumerate(before + epoch * self.appearances):
                ranks[parts == part] = first + np.arange(shares[part])
            self._last_stretch = (key, parts, ranks)
        return self._last_stretch[1:]

    def _appearances_before(self, place: int) -> np.ndarray:
        """How often each source appears before this place of an epoch: its share, rounded down; the largest source
        makes up the difference."""
        taken = [int(appearances) * place // self.size for appearances in self.appearances]
        taken[self.largest] += place - sum(taken)
        return np.array(taken)
