"""Training batches from stored features, and the inputs from which the features are computed.

The same samples, captions and replacements as `TrainingWindows` draws: a run that reads stored features equals the one
that computes them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from neuclip.data.feature_store import BAD, FeatureStore
from neuclip.data.hold_out import Subset
from neuclip.data.loader import Tokenize, TrainingWindows, Windows
from neuclip.data.order import SourceOrder
from neuclip.data.sample import BadSample, Fault, Sample
from neuclip.data.source import Source
from neuclip.errors import RunFailed


def origins(source: Source) -> list[tuple[Source, np.ndarray]]:
    """The sources that it is made of, and its samples' ids there, in order of its ids. Features are stored by those:
    they stay valid whatever data.hold_out takes away, and in whatever mixture a source is."""
    return [
        (part.source, part.source_ids()) if isinstance(part, Subset) else (part, np.arange(len(part)))
        for part in source.parts
    ]


class StoredSide:
    """Where the rows of each sample of a training set are, of its images or of its captions."""

    def __init__(self, stores: Sequence[FeatureStore], ids: Sequence[np.ndarray]):
        self.stores = list(stores)
        self.store_of = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
        self.id_of = np.concatenate(ids)
        self.counts = np.concatenate([store.counts[one] for store, one in zip(stores, ids, strict=True)])
        self.faults = [store.faults() for store in stores]

    def draw(self, id: int) -> tuple[FeatureStore, int]:
        """The store and the place of a row: of several captions one is drawn, as `TrainingWindows` does."""
        number, own, count = int(self.store_of[id]), int(self.id_of[id]), int(self.counts[id])
        store = self.stores[number]
        if count == BAD:
            fault = self.faults[number][own]
            raise BadSample(fault.reason, fault.where)
        return store, own + (random.choice(range(count)) * store.samples if count > 1 else 0)


@dataclass(eq=False)
class StoredWindows(TrainingWindows):
    """As TrainingWindows, with stored features instead of images, of captions, or of both."""

    images: StoredSide | None = None
    texts: StoredSide | None = None

    @property
    def reads_source(self) -> bool:
        return self.images is None or self.texts is None

    def _prefetch(self, start: int) -> None:
        if self.reads_source:
            super()._prefetch(start)

    def _pair(self, id: int, seed: int) -> tuple[Any, Any]:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        sample = self.source[id] if self.reads_source else Sample(b"", ())
        caption = self.texts.draw(id) if self.texts else self._caption(id, sample)
        return self.images.draw(id) if self.images else self.pixels(id, sample, self.decode), caption

    def _collate(self, images: list[Any], captions: list[Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        pixels = stack([store.features(place) for store, place in images]) if self.images else default_collate(images)
        if not self.texts:
            return pixels, self.tokenize(captions), None
        tokens = stack([store.tokens(place) for store, place in captions]).long()
        return pixels, tokens, stack([store.features(place) for store, place in captions])


def stack(rows: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(rows))


class TrunkInputs(NamedTuple):
    """What a trunk needs for a block of samples."""

    first: int
    inputs: Tensor  # images (r, 3, H, W) or tokens (r, L); (0,) where no sample can be used
    counts: np.ndarray  # (k,) int32: how many of the r are of each sample, or BAD
    faults: tuple[Fault, ...]


@dataclass(eq=False)
class TrunkInputWindows(Windows):
    """The start of a block of ids -> all its images, or all its captions."""

    tokenize: Tokenize
    decode: Any
    side: str

    def __getitem__(self, start: int) -> TrunkInputs | RunFailed:
        inputs: list[Any] = []
        counts, faults = [], []
        try:
            self.source.prefetch(SourceOrder(len(self.source)), start, self.size)
            for id in range(start, min(start + self.size, len(self.source))):
                try:
                    own = self._inputs(id)
                except BadSample as bad:
                    own = ()
                    faults.append(Fault(id, bad.reason, bad.where))
                counts.append(len(own) or BAD)
                inputs += own
        except RunFailed as failure:
            return failure
        collate = default_collate if self.side == "image" else self.tokenize
        tensor = collate(inputs) if inputs else torch.empty(0)
        return TrunkInputs(start, tensor, np.array(counts, dtype="<i4"), tuple(faults))

    def _inputs(self, id: int) -> Sequence[Any]:
        sample = self.source[id]
        if self.side == "image":
            return (self.pixels(id, sample, self.decode),)
        if not sample.captions:
            raise BadSample("caption is missing", self.source.where(id))
        return sample.captions
