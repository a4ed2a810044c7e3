"""`neuclip merge`: a model between the one that was fine-tuned and the result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.errors import UserError
from neuclip.models.export import export_model
from neuclip.models.interpolation import interpolate
from neuclip.models.towers import BuiltModel
from neuclip.runs.model_card import merged_card
from neuclip.runs.new_folder import new_folder, refuse_existing
from neuclip.runs.target import open_target

STARTS = ("init_logit_scale", "init_logit_bias")  # of a config: where training began, not what the model computes


def merge(base: str, run: str, weight: float, folder: Path) -> None:
    """Write (1 - weight) base + weight run as an open_clip folder. `base` and `run`: what `neuclip eval` opens."""
    refuse_existing(folder)
    merged = merge_models(base, run, weight)
    with new_folder(folder) as unfinished:
        export_model(merged, unfinished)
        (unfinished / "README.md").write_text(merged_card(merged, base, run, weight), encoding="utf-8")


def merge_models(base: str, run: str, weight: float) -> BuiltModel:
    """The model of `run` with the weights in between."""
    (first, _), (second, _) = open_target(base), open_target(run)
    for what, of in (("architecture", _architecture), ("preprocessing", _preprocessing)):
        if of(first) != of(second):
            different = [key for key in of(second) | of(first) if of(first).get(key) != of(second).get(key)]
            raise UserError(
                f"{base} and {run} have another {what} ({', '.join(different)}); only a model and what was "
                "fine-tuned from it can be merged"
            )
    model = second.towers.model.cpu()
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        print(
            "the model has BatchNorm: its statistics are interpolated too, which is not what the merged weights would "
            "give; measure the result before you use it",
            file=sys.stderr,
        )
    model.load_state_dict(interpolate(first.towers.model.cpu().state_dict(), model.state_dict(), weight))
    return second


def _architecture(built: BuiltModel) -> dict[str, Any]:
    return _plain({key: value for key, value in built.config.items() if key not in STARTS and value})


def _preprocessing(built: BuiltModel) -> dict[str, Any]:
    return _plain(getattr(built.towers.model.visual, "preprocess_cfg", {}))


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Whether a sequence came from a file, as a list, or from open_clip's defaults, as a tuple, does not count."""
    return json.loads(json.dumps(config))
