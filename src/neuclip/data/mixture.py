"""Several sources as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from neuclip.data.captions import Captions
from neuclip.data.order import Order
from neuclip.data.sample import Sample
from neuclip.data.source import Source, SourceFiles


class Mixture(Source):
    """Sources of any kinds end to end. Weights count in training only: `data/mixture_order.py` reads them."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[Fraction]):
        self.sources = tuple(sources)
        self.weights = tuple(weights)
        self.name = "+".join(source.name for source in sources)
        self.kind = "+".join(dict.fromkeys(source.kind for source in sources))
        self.faults = tuple(fault for source in sources for fault in source.faults)
        self.fetches = any(source.fetches for source in sources)
        self.captions_are_files = any(source.captions_are_files for source in sources)
        self._ends = np.cumsum([len(source) for source in sources])

    @property
    def parts(self) -> tuple[Source, ...]:
        return self.sources

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, id: int) -> Sample:
        self.check_id(id)
        source, own_id = self._place(id)
        return source[own_id]

    def where(self, id: int) -> str:
        source, own_id = self._place(id)
        return source.where(own_id)

    def caption_pieces(self) -> Iterator[Captions]:
        for source in self.sources:
            yield from source.caption_pieces()

    def order(self, seed: int) -> Order:
        from neuclip.data.mixture_order import order_of

        return order_of(self, seed)

    def check_images(self) -> None:
        for source in self.sources:
            source.check_images()

    def describe_files(self) -> SourceFiles:
        files = [source.describe_files() for source in self.sources]
        sizes = [one.bytes for one in files if one.bytes is not None]
        return SourceFiles(sum(one.number for one in files), sum(sizes) if len(sizes) == len(files) else None)

    def places(self) -> set[str]:
        return set().union(*(source.places() for source in self.sources))

    def _place(self, id: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self._ends, id, side="right"))
        return self.sources[number], id - (int(self._ends[number - 1]) if number else 0)
