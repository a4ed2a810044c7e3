"""Several sources as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from neuclip.data.sample import Fault, Sample
from neuclip.data.source import Source
from neuclip.data.texts import Captions


class Mixture(Source):
    """Sources of any kinds end to end. Weights count in training only: `data/mixture_order.py` reads them."""

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

    def caption_pieces(self) -> Iterator[Captions]:
        for source in self.sources:
            yield from source.caption_pieces()

    def _place(self, id: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self._ends, id, side="right"))
        return self.sources[number], id - (int(self._ends[number - 1]) if number else 0)
