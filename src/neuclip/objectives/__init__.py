"""The equations and the methods. Imports torch and `neuclip.distributed`; knows no data, files or progress."""

from __future__ import annotations

from dataclasses import asdict, fields

from neuclip.objectives.amorlip import AmorLIP
from neuclip.objectives.clip import CLIP
from neuclip.objectives.drrho import DRRho
from neuclip.objectives.fastclip import FastCLIP
from neuclip.objectives.neuclip import NeuCLIP
from neuclip.objectives.objective import Objective
from neuclip.objectives.scent import SCENT
from neuclip.objectives.siglip import SigLIP
from neuclip.settings.objectives import ObjectiveSettings

OBJECTIVES: dict[str, type[Objective]] = {
    "clip": CLIP,
    "siglip": SigLIP,
    "fastclip": FastCLIP,
    "amorlip": AmorLIP,
    "neuclip": NeuCLIP,
    "scent": SCENT,
    "drrho": DRRho,
}


def build_objective(name: str, settings: ObjectiveSettings, **known: int) -> Objective:
    """The objective of a run. `known` holds values of the run (embed_dim, dataset_size, total_samples, ...), of which
    the objective takes those that it has arguments for. A setting of the same name replaces one unless it is 0."""
    kind, options = OBJECTIVES[name], asdict(settings)
    from_run = {field.name: known[field.name] for field in fields(kind) if field.name in known}
    return kind(**from_run | {name: value for name, value in options.items() if name not in from_run or value})
