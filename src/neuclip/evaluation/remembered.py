"""Features by what they were made from, so that what several held-out sets share is embedded once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

MOST = 200_000  # rows that are kept for later sets: 0.4 GB at 512 features


class RememberedFeatures:
    """Rows of features by key (a text, or the digest of an image); float32 on the CPU."""

    def __init__(self, width: int):
        self.width = width
        self.forget()

    def forget(self) -> None:
        self._row_of: dict[Hashable, int] = {}
        self._blocks: list[Tensor] = []
        self._rows = 0

    def make_room(self) -> None:
        """Before a set is embedded: more than MOST rows are forgotten, so that memory is bounded by those of a set."""
        if self._rows > MOST:
            self.forget()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._row_of

    def add(self, keys: Sequence[Hashable], features: Tensor) -> None:  # (len(keys), d)
        """A key that is known already, or comes twice, keeps its first row."""
        for row, key in enumerate(keys, start=self._rows):
            self._row_of.setdefault(key, row)
        self._blocks.append(features)
        self._rows += len(features)

    def rows(self, keys: Sequence[Hashable]) -> Tensor:  # -> (len(keys), d)
        """The features of the keys; a block of its own, not a copy, where they are just what was added last."""
        wanted = torch.tensor([self._row_of[key] for key in keys], dtype=torch.int64)
        found = torch.empty(0, self.width)
        end = self._rows
        for block in reversed(self._blocks):
            start = end - len(block)
            if len(wanted) == len(block) and torch.equal(wanted, torch.arange(start, end)):
                return block
            if len(found) != len(wanted):
                found = torch.empty(len(wanted), self.width)
            here = (wanted >= start) & (wanted < end)
            found[here] = block[wanted[here] - start]
            end = start
        return found
