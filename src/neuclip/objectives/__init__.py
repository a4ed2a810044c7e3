"""The maths and the methods. Knows torch and `neuclip.distributed`; nothing of data, files or progress."""

from __future__ import annotations

from dataclasses import asdict, fields

from neuclip.objectives.amorlip import AmorLIP
from neuclip.objectives.clip import CLIP
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
}


def build_objective(name: str, settings: ObjectiveSettings, **known: int) -> Objective:
    """The objective of a run. `known` is what a run can tell it: embed_dim, dataset_size, total_samples, ...; where a
    setting of that name is 0, it is the run's."""
    kind, options = OBJECTIVES[name], asdict(settings)
    told = {field.name: known[field.name] for field in fields(kind) if field.name in known}
    return kind(**told | {name: value for name, value in options.items() if name not in told or value})
