"""Measures a run, a checkpoint or a model folder: figures on held-out sets, and the error of a run's normalizers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from neuclip.data.held_out import HeldOutSets
from neuclip.errors import UserError
from neuclip.evaluation import normalizer_error as error
from neuclip.evaluation.embedding import Embedder
from neuclip.evaluation.runner import Evaluation, evaluate_held_out
from neuclip.models.towers import BuiltModel, build_model
from neuclip.objectives.objective import Objective
from neuclip.plan import choose_device
from neuclip.records import RunFolder
from neuclip.runs.build import build_objective, build_towers, open_training_source, resolve_held_out
from neuclip.runs.checkpoint import find_checkpoint, load_checkpoint
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings


def open_target(target: str) -> tuple[BuiltModel, Settings]:
    """A run's folder, a checkpoint inside one, or the folder of a saved open_clip model."""
    path = Path(target)
    is_checkpoint = path.suffix == ".pt" and path.is_file()
    folder = RunFolder(path.parent.parent if is_checkpoint else path)
    if not folder.settings.is_file():
        built = build_model(target)
        if not target.startswith("local-dir:"):
            raise UserError(f"{target} names a model without weights; give a run, a checkpoint or local-dir:FOLDER")
        return built, resolve_held_out(Settings())
    return load_run(folder, path if is_checkpoint else find_checkpoint(folder))[:2]


def load_run(folder: RunFolder, checkpoint: Path) -> tuple[BuiltModel, Settings, dict[str, Any]]:
    """The model as it was at a checkpoint, the run's settings, and the checkpoint's state."""
    settings = read_settings(folder.settings, [])
    state = load_checkpoint(checkpoint)
    built = build_towers(settings, choose_device(settings.run.device), state)
    built.towers.model.load_state_dict(state["model"])
    return built, settings, state


def measure(
    target: str,
    *,
    retrieval: tuple[str, ...] | None = None,
    zero_shot: tuple[str, ...] | None = None,
    batch_size: int | None = None,
    max_bad_share: float | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    caption_key: str | None = None,
) -> Evaluation:
    """Held-out figures of a run, a checkpoint or `local-dir:FOLDER`, with the reason for each set that is refused.
    What is not given comes from the run's settings."""
    given: dict[str, Any] = {
        "retrieval": retrieval,
        "zero_shot": zero_shot,
        "batch_size": batch_size,
        "image_column": image_column,
        "caption_column": caption_column,
        "caption_key": caption_key,
    }
    built, settings = open_target(target)
    evaluation = replace(settings.evaluation, **{name: value for name, value in given.items() if value is not None})
    sets = HeldOutSets.open(replace(settings, evaluation=evaluation))
    if not (sets.retrieval or sets.zero_shot):
        raise UserError(f"nothing to evaluate {target} on; give --retrieval DATA or --zero-shot FOLDER")
    limit = settings.data.max_bad_share if max_bad_share is None else max_bad_share
    return evaluate_held_out(Embedder(built, evaluation.batch_size, settings.data.workers, max_bad_share=limit), sets)


def normalizer_error(run: Path, *, anchors: int, seed: int, checkpoint: str = "") -> dict[str, Any]:
    """How far the run's normalizers, and a mini-batch's, are from the exact ones over its training data.

    >>> normalizer_error(Path("runs/first"), anchors=10_000, seed=0)["estimators"]["method"]["mean"]  # doctest: +SKIP
    """
    folder = RunFolder(run)
    path = find_checkpoint(folder, checkpoint)
    built, settings, state = load_run(folder, path)
    objective = build_objective(settings, built, len(open_training_source(settings)))
    objective.load_state_dict(state["objective"])
    errors = error_on_training_data(settings, built, objective.eval(), anchors=anchors, seed=seed)
    return errors | {"checkpoint": path.name}


def error_on_training_data(
    settings: Settings, built: BuiltModel, objective: Objective, *, anchors: int, seed: int
) -> dict[str, Any]:
    embedder = Embedder(built, settings.evaluation.batch_size, settings.data.workers)
    pairs = embedder.embed_pairs(open_training_source(settings), "embedding the training data")
    return error.normalizer_error(
        pairs.image_features,
        pairs.text_features[pairs.caption_of],
        logit_scale=built.towers.logit_scale.detach(),
        eps=settings.objective.normalizer_eps,
        objective=objective,
        batch_size=settings.train.batch_size,
        anchors=anchors,
        seed=seed,
        caption_of=pairs.caption_of,
        sample_ids=pairs.ids,
    )
