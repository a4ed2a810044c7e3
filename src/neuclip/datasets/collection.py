"""What every collection of drawings has. Apart from the drawing, because the catalogue must not import numpy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Drawings in one style. `name` begins every id, e.g. `ph/acorn-fill`."""

    name: str
    family: str  # drawings of one origin; a held-out drawing is held out in all styles of its family
    licence: str
    expected: int  # how many drawings there should be
