"""`neuclip merge`: a model between the one that was fine-tuned and the result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.data.held_out import HeldOutSets
from neuclip.errors import UserError
from neuclip.evaluation.embedding import Embedder
from neuclip.evaluation.held_out import evaluate_held_out
from neuclip.models.export import export_model
from neuclip.models.interpolation import interpolate
from neuclip.models.towers import BuiltModel
from neuclip.records import RunFolder, append_line
from neuclip.runs.model_card import merged_card
from neuclip.runs.new_folder import new_folder, refuse_existing
from neuclip.runs.target import open_target
from neuclip.settings.sections import Settings

CURVE = tuple(step / 10 for step in range(11))
STARTS = ("init_logit_scale", "init_logit_bias")  # of a config: where training began, not what the model computes


def merge(base: str, run: str, weight: float, folder: Path) -> None:
    """Write (1 - weight) base + weight run as an open_clip folder. `base` and `run`: what `neuclip eval` opens."""
    refuse_existing(folder)
    merged = merge_models(base, run, weight)
    with new_folder(folder) as unfinished:
        export_model(merged, unfinished)
        (unfinished / "README.md").write_text(merged_card(merged, base, run, weight), encoding="utf-8")


def measure_curve(base: str, run: str) -> list[dict[str, float]]:
    """The held-out figures of `run` at every weight of CURVE, {"weight": 0.3, "SET.METRIC": ...}; also written to
    merge.jsonl in its folder, one line per weight, as they are measured."""
    folder = RunFolder(run)
    if not folder.settings.is_file():
        raise UserError(f"--curve measures on the held-out sets of a run, and {run} is none; give the folder of a run")
    first, second, settings = open_pair(base, run)
    sets = HeldOutSets.open(settings)
    if not (sets.retrieval or sets.zero_shot):
        raise UserError(f"{run} has no held-out sets to measure on; give it some: --evaluation.retrieval DATA")
    model = second.towers.model
    start, tuned = (clone(built.towers.model.state_dict()) for built in (first, second))
    folder.merges.unlink(missing_ok=True)
    lines = []
    for weight in CURVE:
        model.load_state_dict(interpolate(start, tuned, weight))
        evaluation, data = settings.evaluation, settings.data
        embedder = Embedder(second, evaluation.batch_size, data.workers, max_bad_share=data.max_bad_share)
        lines.append({"weight": weight, **evaluate_held_out(embedder, sets).figures})
        append_line(folder.merges, lines[-1])
    return lines


def clone(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU; a state dict itself changes with its model."""
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def merge_models(base: str, run: str, weight: float) -> BuiltModel:
    """The model of `run` with the weights in between."""
    first, second, _ = open_pair(base, run)
    model = second.towers.model.cpu()
    model.load_state_dict(interpolate(first.towers.model.cpu().state_dict(), model.state_dict(), weight))
    return second


def open_pair(base: str, run: str) -> tuple[BuiltModel, BuiltModel, Settings]:
    """Both models and the settings of the second. Raises UserError if nothing lies between them."""
    (first, _), (second, settings) = open_target(base), open_target(run)
    for what, of in (("architecture", _architecture), ("preprocessing", _preprocessing)):
        if of(first) != of(second):
            different = [key for key in of(second) | of(first) if of(first).get(key) != of(second).get(key)]
            raise UserError(
                f"{base} and {run} have another {what} ({', '.join(different)}); only a model and what was "
                "fine-tuned from it can be merged"
            )
    if _statistics(first) != _statistics(second):
        print(
            "the model has BatchNorm: its statistics are interpolated too, which is not what the merged weights would "
            "give; measure the result before you use it",
            file=sys.stderr,
        )
    return first, second, settings


def _statistics(built: BuiltModel) -> list[list[float]]:
    """Of BatchNorm: they are the same where a tower with BatchNorm was locked."""
    norms = [module for module in built.towers.model.modules() if isinstance(module, _BatchNorm)]
    return [values.tolist() for norm in norms for values in norm.buffers() if values.is_floating_point()]


def _architecture(built: BuiltModel) -> dict[str, Any]:
    return _plain({key: value for key, value in built.config.items() if key not in STARTS and value})


def _preprocessing(built: BuiltModel) -> dict[str, Any]:
    return _plain(getattr(built.towers.model.visual, "preprocess_cfg", {}))


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Whether a sequence came from a file, as a list, or from open_clip's defaults, as a tuple, does not count."""
    return json.loads(json.dumps(config))
