"""A drawing together with its image."""

from __future__ import annotations

from dataclasses import dataclass

from neuclip.datasets.icons.listing import Drawing
from neuclip.datasets.icons.split import Named
from neuclip.datasets.icons.workers import Drawn


@dataclass(frozen=True)
class Pair:
    """One image-text pair before it has a place in a shard."""

    drawing: Drawing
    drawn: Drawn

    @property
    def caption(self) -> str:
        return self.drawing.caption

    @property
    def named(self) -> Named:
        return Named(self.caption, self.drawing.source.family)
