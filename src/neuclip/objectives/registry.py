"""Name -> objective: the one table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from neuclip.objectives.clip import CLIP
from neuclip.objectives.neuclip import NeuCLIP
from neuclip.objectives.objective import Objective

OBJECTIVES: dict[str, type[Objective]] = {"clip": CLIP, "neuclip": NeuCLIP}
NEEDS_EMBED_DIM = {"neuclip"}


def build_objective(name: str, settings: Any, *, embed_dim: int) -> Objective:
    """The objective a run asked for; `settings` is its dataclass of `neuclip.settings.objectives`."""
    sizes = {"embed_dim": embed_dim} if name in NEEDS_EMBED_DIM else {}
    return OBJECTIVES[name](**sizes, **asdict(settings))
