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

OBJECTIVES: dict[str, type[Objective]] = {
    "clip": CLIP,
    "siglip": SigLIP,
    "fastclip": FastCLIP,
    "amorlip": AmorLIP,
    "neuclip": NeuCLIP,
}
# What a method must know of the model, the data or the run, beside its settings.
NEEDS: dict[str, tuple[str, ...]] = {
    "fastclip": ("dataset_size", "epoch_samples", "total_samples"),
    "amorlip": ("embed_dim", "epoch_samples", "total_samples"),
    "neuclip": ("embed_dim",),
}
# Fields of an objective that are told to the towers instead (training/run.py).
OF_THE_MODEL = ("bias_initial",)


def build_objective(
    name: str, settings: Any, *, embed_dim: int, dataset_size: int, total_samples: int, epoch_samples: int = 0
) -> Objective:
    """The objective a run asked for; `settings` is its dataclass of `neuclip.settings.objectives`.

    `epoch_samples`: samples that an epoch draws, where weights of sources make them other than `dataset_size`.
    """
    told = {field: value for field, value in asdict(settings).items() if field not in OF_THE_MODEL}
    known: dict[str, Any] = {
        "embed_dim": embed_dim,
        "dataset_size": dataset_size,
        "epoch_samples": told.pop("epoch_samples", 0) or epoch_samples or dataset_size,
        "total_samples": total_samples,
    }
    return OBJECTIVES[name](**{need: known[need] for need in NEEDS.get(name, ())}, **told)
