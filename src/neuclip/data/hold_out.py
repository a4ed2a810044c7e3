"""`data.hold_out`: some pairs of the training data kept for evaluation, the same ones whenever the data is opened."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from neuclip.data.captions import Captions, Texts
from neuclip.data.mixture import Mixture
from neuclip.data.order import SHARDS_TOGETHER, Order, ShardOrder, epoch_keys, mix
from neuclip.data.sample import Sample
from neuclip.data.source import ShardFacts, Source, SourceFiles
from neuclip.data.tar.cache import check_cache_size
from neuclip.errors import UserError

SUFFIX = "#held-out"  # behind the name of the training data: what is kept from training
CHOICE = 0x68656C64  # keeps the choice apart from the order of training, which has the same seed


class Subset(Source):
    """Some samples of a source with dense ids of their own: those in `ids`, or all others.

    It stores only `ids`, which are sorted: the rest of a billion samples would take gigabytes.
    """

    def __init__(self, source: Source, ids: np.ndarray, *, others: bool = False):
        self.source = source
        self.ids = ids
        self.others = others
        self.name = source.name if others else f"{source.name}{SUFFIX}"
        self.kind = source.kind
        self.files = source.files
        self.faults = source.faults if others else ()  # what could not be indexed counts once
        self.fetches = source.fetches
        self.captions_are_files = source.captions_are_files
        self.texts_are_captions = source.texts_are_captions
        self.images_in_rows = source.images_in_rows
        if source.captions_sha256:  # of so many captions that reading them again would take long
            identity = f"{source.captions_sha256} {others} ".encode() + ids.astype("<i8").tobytes()
            self.captions_sha256 = hashlib.sha256(identity).hexdigest()
        self._before = ids - np.arange(len(ids))  # how many of the others come before each of `ids`

    def __len__(self) -> int:
        return len(self.source) - len(self.ids) if self.others else len(self.ids)

    def source_id(self, id: int) -> int:
        return id + int(np.searchsorted(self._before, id, side="right")) if self.others else int(self.ids[id])

    def source_ids(self) -> np.ndarray:
        """(n,) int64: those of all its samples."""
        return np.delete(np.arange(len(self.source)), self.ids) if self.others else self.ids

    def __getitem__(self, id: int) -> Sample:
        self.check_id(id)
        return self.source[self.source_id(id)]

    def where(self, id: int) -> str:
        return self.source.where(self.source_id(id))

    def caption_pieces(self) -> Iterator[Captions]:
        first = 0
        for piece in self.source.caption_pieces():
            last = first + len(piece.first)
            listed = np.zeros(last - first, dtype=bool)
            listed[self.ids[slice(*np.searchsorted(self.ids, [first, last]))] - first] = True
            yield _select(piece, ~listed if self.others else listed)
            first = last

    def labels(self) -> list[int] | None:
        labels = self.source.labels()
        return None if labels is None else [labels[self.source_id(id)] for id in range(len(self))]

    def order(self, seed: int) -> Order:
        """As the source's: of remote data shard by shard."""
        facts = self.shard_facts()
        if facts is None or not facts.disk_bytes:
            return Order(len(self), seed)
        check_cache_size([self], SHARDS_TOGETHER)
        return ShardOrder(np.cumsum(facts.samples), seed)

    def shard_facts(self) -> ShardFacts | None:
        facts = self.source.shard_facts()
        if facts is None:
            return None
        ends = np.cumsum(facts.samples)
        listed = np.searchsorted(self.ids, ends)
        return facts._replace(samples=np.diff(ends - listed if self.others else listed, prepend=0).tolist())

    def cheap_ids(self) -> int | None:
        facts = self.shard_facts()
        if facts is None or self.source.cheap_ids() is None:
            return None
        return next(samples for samples in facts.samples if samples)

    def prefetch(self, order: Order, start: int, count: int) -> None:
        self.source.prefetch(order, start, count)  # an order of shards, whose numbers are the source's

    def mark_needed(self, order: Order, start: int) -> None:
        self.source.mark_needed(order, start)

    def check_images(self) -> None:
        self.source.check_images()

    def describe_files(self) -> SourceFiles:
        return self.source.describe_files()

    def places(self) -> set[str]:
        return self.source.places()

    def image_keys(self) -> np.ndarray | None:
        keys = self.source.image_keys()
        return None if keys is None else np.delete(keys, self.ids) if self.others else keys[self.ids]

    def has_remote_indexes(self) -> bool:
        return self.source.has_remote_indexes()


def _select(captions: Captions, kept: np.ndarray) -> Captions:
    """The captions of those samples of a piece that are kept."""
    lengths = np.diff(captions.first.ends, prepend=0)
    first = Texts(captions.first.bytes[np.repeat(kept, lengths)], np.cumsum(lengths[kept]))
    further = captions.further[kept[captions.further["number"]]]
    further["number"] = (np.cumsum(kept) - 1)[further["number"]]
    return Captions(first, further)


def split(source: Source, count: int, seed: int) -> tuple[Source, Source]:
    """Training data and the held-out samples: `count`, or a few more to keep the pairs of an image together. No image
    is on both sides, as far as names of files tell. Of several sources each gives its share by size, whatever its
    weight."""
    parts = source.parts
    if not 0 < count < len(source):
        raise UserError(
            f"data.hold_out is {count:,} and {source.name} has {len(source):,} samples; give a smaller "
            f"--data.hold_out, {max(1, len(source) // 10):,} for example"
        )
    _refuse_shared_files(parts)
    chosen = _choose(parts, count, seed)
    training = [Subset(part, ids, others=True) for part, ids in zip(parts, chosen, strict=True)]
    held_out = [Subset(part, ids) for part, ids in zip(parts, chosen, strict=True) if len(ids)]
    if empty := [part.name for part in training if not len(part)]:
        raise UserError(f"data.hold_out {count:,} leaves nothing of {empty[0]}; give a smaller --data.hold_out")
    if not isinstance(source, Mixture):
        return training[0], held_out[0]
    mixture = Mixture(held_out, [Fraction(1)] * len(held_out))
    mixture.name = f"{source.name}{SUFFIX}"
    return Mixture(training, source.weights), mixture


def _refuse_shared_files(parts: Sequence[Source]) -> None:
    seen: set[str] = set()
    for part in parts:
        if shared := seen & part.places():
            raise UserError(
                f"data.train names {min(shared)} more than once: data.hold_out would leave pairs of it on both sides; "
                "name it once, with a weight"
            )
        seen |= part.places()


def _choose(parts: Sequence[Source], count: int, seed: int) -> list[np.ndarray]:
    """The sorted ids that each part gives."""
    ends = np.cumsum([0, *map(len, parts)])
    shares = np.diff(ends * count // ends[-1]).tolist()
    seeds = mix(epoch_keys(seed ^ CHOICE, np.arange(len(parts)))).tolist()
    keys = [part.image_keys() for part in parts]
    chosen = [_choose_from(*one) for one in zip(parts, keys, shares, seeds, strict=True)]
    held_out = np.concatenate([key[ids] for key, ids in zip(keys, chosen, strict=True) if key is not None] or [[]])
    # An image that another part names as well goes with it.
    return [
        ids if key is None else np.flatnonzero(np.isin(key, held_out)) for key, ids in zip(keys, chosen, strict=True)
    ]


def _choose_from(part: Source, keys: np.ndarray | None, count: int, seed: int) -> np.ndarray:
    facts = part.shard_facts()
    if part.fetches and facts is not None:  # from few shards: all that hold one are downloaded for an evaluation
        ends = np.cumsum([0, *facts.samples])
        shards = Order(len(facts.samples), seed).ids(0, len(facts.samples))
        return np.sort(np.concatenate([np.arange(ends[shard], ends[shard + 1]) for shard in shards])[:count])
    if keys is None:
        return np.sort(Order(len(part), seed).ids(0, count))
    _, first, image = np.unique(keys, return_index=True, return_inverse=True)
    image = np.argsort(np.argsort(first))[image]  # numbered as they come: keys change when the files move
    sizes = np.bincount(image)
    images = Order(len(sizes), seed).ids(0, len(sizes))
    enough = int(np.searchsorted(np.cumsum(sizes[images]), count)) + 1 if count else 0
    return np.flatnonzero(np.isin(image, images[:enough]))
