"""Several sources as one, and the addresses that name them: `a.csv:2,shards:0.5`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from neuclip.data.sample import Fault, Sample
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

    def captions(self) -> list[str]:
        return [caption for source in self.sources for caption in source.captions()]

    def _place(self, id: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self._ends, id, side="right"))
        return self.sources[number], id - (int(self._ends[number - 1]) if number else 0)
