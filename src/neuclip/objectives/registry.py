"""Name -> objective: the one table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from neuclip.objectives.amorlip import AmorLIP
from neuclip.objectives.clip import CLIP
from neuclip.objectives.fastclip import FastCLIP
from neuclip.objectives.neuclip import NeuCLIP
from neuclip.objectives.objective import Objective
from neuclip.objectives.siglip import SigLIP
from neuclip.settings.objectives import ObjectiveSettings

OBJECTIVES: dict[str, type[Objective]] = {
    "clip": CLIP,
    "siglip": SigLIP,
    "fastclip": FastCLIP,
    "amorlip": AmorLIP,
    "neuclip": NeuCLIP,
}


def build_objective(
    name: str,
    settings: ObjectiveSettings,
    *,
    embed_dim: int,
    dataset_size: int,
    total_samples: int,
    epoch_samples: int = 0,
) -> Objective:
    """The objective of a run; `settings` is its dataclass of `neuclip.settings.objectives`.

    `epoch_samples`: samples per epoch where weights of sources make them another number than `dataset_size`.
    """
    kind = OBJECTIVES[name]
    arguments = {field: value for field, value in asdict(settings).items() if field not in settings.model_fields}
    known: dict[str, Any] = {
        "embed_dim": embed_dim,
        "dataset_size": dataset_size,
        "epoch_samples": arguments.pop("epoch_samples", 0) or epoch_samples or dataset_size,
        "total_samples": total_samples,
    }
    return kind(**{need: known[need] for need in kind.needs}, **arguments)
