"""Combines several sources, splits off the samples of data.hold_out, and groups pairs of the same image.

Weight w means that every sample of a source appears w times per epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from neuclip.data.order import Order, ShardOrder, WeightedOrder, epoch_keys, mix
from neuclip.data.source import FACTS, BadSample, Sample, Source, check_id
from neuclip.data.tar.remote_source import RemoteTarSource
from neuclip.errors import UserError

HELD_OUT_SUFFIX = "#held-out"  # NAME#held-out: the samples that are kept out of training on the data NAME
HOLD_OUT_SALT = 0x68656C64  # makes the choice independent of the training order, which has the same seed
STRETCH = 10_000  # local samples that are treated as one shard if local data are mixed with remote data


class Mixture(Source):
    """Several sources one after the other: the ids of each follow those of the one before. Of each source, the samples
    in `held_out` (sorted ids) are left out. Only these ids are stored: the others could be a billion, which would take
    gigabytes."""

    def __init__(self, parts: Sequence[Source], weights: Sequence[int], held_out: Sequence[np.ndarray] = ()):
        self.parts, self.weights = tuple(parts), tuple(weights)
        self.held_out = tuple(held_out) or tuple(np.zeros(0, np.int64) for _ in parts)
        self._before = [ids - np.arange(len(ids)) for ids in self.held_out]  # how many samples stay before each
        self.sizes = np.array([len(part) - len(ids) for part, ids in zip(parts, self.held_out, strict=True)])
        self.ends = np.cumsum(self.sizes)
        self.name = "+".join(part.name for part in parts)
        self.kind = "+".join(dict.fromkeys(part.kind for part in parts))
        folders = {part.folder for part in parts}
        self.folder: Path | None = folders.pop() if len(folders) == 1 else None
        self.faults = tuple(fault for part in parts for fault in part.faults)
        if any(part.shard_ends is not None for part in parts):
            self.part_shards = [self._ends_of(number) for number in range(len(parts))]
            starts = zip(self.ends - self.sizes, self.part_shards, strict=True)
            self.shard_ends = np.concatenate([start + ends for start, ends in starts])

    def _ends_of(self, number: int) -> np.ndarray:
        """The ends of a part's shards, in ids without the held-out samples. A local part is cut into stretches."""
        ends = self.parts[number].shard_ends
        if ends is None:
            return np.append(np.arange(STRETCH, self.sizes[number], STRETCH), self.sizes[number])
        return ends - np.searchsorted(self.held_out[number], ends)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def places(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.searchsorted(self.ends, ids, side="right")
        part_ids = ids - (self.ends - self.sizes)[numbers]
        for number in np.unique(numbers).tolist():
            mask = numbers == number
            part_ids[mask] += np.searchsorted(self._before[number], part_ids[mask], side="right")
        return numbers, part_ids

    def _part_and_id(self, id: int) -> tuple[Source, int]:
        check_id(id, len(self))
        (number,), (part_id,) = self.places(np.array([id]))
        return self.parts[number], int(part_id)

    def __getitem__(self, id: int) -> Sample:
        part, part_id = self._part_and_id(id)
        return part[part_id]

    def where(self, id: int) -> str:
        part, part_id = self._part_and_id(id)
        return part.where(part_id)

    def caption_facts(self) -> Iterator[np.ndarray]:
        for part, held_out in zip(self.parts, self.held_out, strict=True):
            first = 0
            for piece in part.caption_facts():
                inside = held_out[slice(*np.searchsorted(held_out, [first, first + len(piece)]))]
                yield np.delete(piece, inside - first) if len(inside) else piece
                first += len(piece)

    def image_keys(self, ids: np.ndarray | None = None, *, read_images: bool = False) -> np.ndarray | None:
        ids = np.arange(len(self)) if ids is None else ids
        numbers, part_ids = self.places(ids)
        keys, known = mix(ids.astype(np.uint64)), False  # unique keys, for parts where every pair has its own image
        for number, part in enumerate(self.parts):
            rows = np.flatnonzero(numbers == number)
            part_keys = part.image_keys(part_ids[rows], read_images=read_images)
            if part_keys is not None:
                keys[rows], known = part_keys, True
        return keys if known else None

    def images_version(self) -> str:
        return hashlib.sha256("\n".join(part.images_version() for part in self.parts).encode()).hexdigest()

    def prefetch(self, shards: Sequence[int]) -> None:
        first = 0
        for part, ends in zip(self.parts, self.part_shards, strict=True):
            part.prefetch([shard - first for shard in shards if first <= shard < first + len(ends)])
            first += len(ends)


class Selection(Source):
    """Chosen samples of a source. Given `keys` (n,), one per chosen sample, those with equal keys (the same image)
    become one sample with all their captions. Images keep the order in which they first appear."""

    def __init__(self, source: Source, ids: np.ndarray, keys: np.ndarray | None = None, name: str = ""):
        self.source, self.kind, self.folder = source, source.kind, source.folder
        self.name = name or source.name
        self.faults = (
            source.faults if len(ids) == len(source) else ()
        )  # for a part of the source: the other part has them
        image = np.arange(len(ids))
        if keys is not None:
            _, first, image = np.unique(keys, return_index=True, return_inverse=True)
            image = np.argsort(np.argsort(first))[image]
        self._rows = ids[np.argsort(image, kind="stable")]
        self._ends = np.cumsum(np.bincount(image))
        if source.shard_ends is not None:
            self.shard_ends = np.searchsorted(ids, source.shard_ends) if keys is None else self._ends[-1:]

    def rows(self, id: int) -> list[int]:
        """The ids in the source of the samples that this sample consists of."""
        check_id(id, len(self))
        return self._rows[self._ends[id - 1] if id else 0 : self._ends[id]].tolist()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, id: int) -> Sample:
        """The sample. A row without a usable caption makes it bad only if the image has no other row."""
        samples, first_bad = [], None
        for row in self.rows(id):
            try:
                samples.append(self.source[row])
            except BadSample as bad:
                first_bad = first_bad or bad
        if not samples:
            assert first_bad is not None
            raise first_bad
        return Sample(samples[0].image, tuple(chain.from_iterable(sample.captions for sample in samples)))

    def where(self, id: int) -> str:
        return self.source.where(self.rows(id)[0])

    def caption_facts(self) -> Iterator[np.ndarray]:
        """The facts of the samples; for a sample of several rows, the hash is a hash of their hashes."""
        rows = np.concatenate([np.zeros(0, FACTS), *self.source.caption_facts()])[self._rows]
        if len(self._ends) == len(rows):
            yield rows
            return
        facts = rows[self._ends - 1]
        facts["captions"] = np.add.reduceat(rows["captions"], self._ends - np.diff(self._ends, prepend=0))
        for id in np.flatnonzero(np.diff(self._ends, prepend=0) > 1).tolist():
            hashes = rows["hash"][self._ends[id - 1] if id else 0 : self._ends[id]].tobytes()
            facts["hash"][id] = int.from_bytes(hashlib.blake2b(hashes, digest_size=8).digest(), "little")
        yield facts

    def image_keys(self, ids: np.ndarray | None = None, *, read_images: bool = False) -> np.ndarray | None:
        first = self._rows[self._ends - np.diff(self._ends, prepend=0)]
        return self.source.image_keys(first if ids is None else first[ids], read_images=read_images)

    def images_version(self) -> str:
        return self.source.images_version()


def group_by_image(source: Source) -> Source:
    """The source with samples of the same image grouped into one. Without grouping, retrieval would count an image's
    other captions as wrong."""
    keys = source.image_keys(read_images=True)
    if keys is None or len(np.unique(keys)) == len(keys):
        return source
    return Selection(source, np.arange(len(source)), keys)


def order_of(source: Source, seed: int) -> Order:
    """The endless order in which training reads a source. Remote data are read from few shards at a time."""
    mixture = source if isinstance(source, Mixture) else None
    for part in mixture.parts if mixture else (source,):
        if isinstance(part, RemoteTarSource):
            part.refuse_small_cache()
    weights = mixture.weights if mixture else (1,)
    if max(weights) == 1:
        return Order(len(source), seed) if source.shard_ends is None else ShardOrder(source.shard_ends, seed)
    assert mixture is not None
    if mixture.shard_ends is None:
        return WeightedOrder(Order(int((mixture.sizes * weights).sum()), seed), mixture.sizes.tolist(), weights)
    ends: list[np.ndarray] = []
    shards: list[np.ndarray] = []
    first_shard = start = 0
    for size, weight, part_ends in zip(mixture.sizes.tolist(), weights, mixture.part_shards, strict=True):
        for _ in range(weight):
            ends.append(start + part_ends)
            shards.append(first_shard + np.arange(len(part_ends)))
            start += size
        first_shard += len(part_ends)
    order = ShardOrder(np.concatenate(ends), seed)
    return WeightedOrder(order, mixture.sizes.tolist(), weights, np.concatenate(shards))


def split(source: Source, count: int, seed: int) -> tuple[Source, Source]:
    """Split a source into training data and held-out samples: `count` of them, or a few more to keep the pairs of an
    image together. No image is on both sides, as far as file names tell. Each of several sources gives a share in
    proportion to its size; weights do not matter. The choice is the same whenever the data is opened."""
    if not 0 < count < len(source):
        raise UserError(
            f"data.hold_out is {count:,} and {source.name} has {len(source):,} samples; give a smaller "
            f"--data.hold_out, {max(1, len(source) // 10):,} for example"
        )
    parts, weights = (source.parts, source.weights) if isinstance(source, Mixture) else ((source,), (1,))
    chosen = _choose(parts, count, seed)
    if empty := [part.name for part, ids in zip(parts, chosen, strict=True) if len(ids) == len(part)]:
        raise UserError(f"data.hold_out {count:,} leaves nothing of {empty[0]}; give a smaller --data.hold_out")
    starts = np.cumsum([0, *map(len, parts)])
    held_out = np.concatenate([start + ids for start, ids in zip(starts[:-1], chosen, strict=True)])
    return Mixture(parts, weights, chosen), Selection(source, held_out, name=f"{source.name}{HELD_OUT_SUFFIX}")


def _choose(parts: Sequence[Source], count: int, seed: int) -> list[np.ndarray]:
    """The sorted ids of the held-out samples of each part."""
    ends = np.cumsum([0, *map(len, parts)])
    shares = np.diff(ends * count // ends[-1]).tolist()
    seeds = mix(epoch_keys(seed ^ HOLD_OUT_SALT, np.arange(len(parts)))).tolist()
    keys = [part.image_keys() for part in parts]
    chosen = [_choose_from(*one) for one in zip(parts, keys, shares, seeds, strict=True)]
    held_out = np.concatenate([key[ids] for key, ids in zip(keys, chosen, strict=True) if key is not None] or [[]])
    # If another part has a held-out image too, hold it out there as well.
    return [
        ids if key is None else np.flatnonzero(np.isin(key, held_out)) for key, ids in zip(keys, chosen, strict=True)
    ]


def _choose_from(part: Source, keys: np.ndarray | None, count: int, seed: int) -> np.ndarray:
    if part.shard_ends is not None:  # from few shards, because an evaluation downloads each shard with a chosen sample
        ends = np.concatenate([[0], part.shard_ends])
        chosen = np.zeros(0, np.int64)
        for shard in Order(len(ends) - 1, seed).ids(0, len(ends) - 1).tolist():
            chosen = np.concatenate([chosen, np.arange(ends[shard], ends[shard + 1])])
            if len(chosen) >= count:
                break
        return np.sort(chosen[:count])
    if keys is None:
        return np.sort(Order(len(part), seed).ids(0, count))
    _, first, image = np.unique(keys, return_index=True, return_inverse=True)
    image = np.argsort(np.argsort(first))[image]  # numbered by first appearance, because keys change when files move
    sizes = np.bincount(image)
    images = Order(len(sizes), seed).ids(0, len(sizes))
    enough = int(np.searchsorted(np.cumsum(sizes[images]), count)) + 1 if count else 0
    return np.flatnonzero(np.isin(image, images[:enough]))
