"""The error of a run's normalizers: at a checkpoint, or while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neuclip.distributed.collectives import is_main, single_process
from neuclip.evaluation import normalizer_error as error
from neuclip.evaluation.embedding import Embedder
from neuclip.models.towers import BuiltModel
from neuclip.objectives.objective import Objective
from neuclip.records import RunFolder
from neuclip.runs.build import build_objective, open_training_source
from neuclip.runs.checkpoint import find_checkpoint
from neuclip.runs.target import load_run
from neuclip.settings.sections import Settings
from neuclip.training.run import Run


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
    pairs = embedder.embed_pairs(open_training_source(settings), "embedding the training data", first_caption_only=True)
    return error.normalizer_error(
        pairs.image_features,
        pairs.text_features[pairs.first_text],
        logit_scale=built.towers.logit_scale.detach(),
        eps=settings.objective.normalizer_eps,
        objective=objective,
        batch_size=settings.train.batch_size,
        anchors=anchors,
        seed=seed,
        caption_of=pairs.first_text,
        sample_ids=pairs.ids,
    )


def whole_objective(run: Run) -> Objective | None:
    """Collective. On the main rank a copy of the objective that holds the state of all ranks; None on the others."""
    state = run.objective.state_dict()
    if not is_main():
        return None
    with single_process():
        copy = build_objective(run.settings, run.built, len(run.source))
        copy.load_state_dict(state)
        return copy.eval()


def measure_error(run: Run, objective: Objective) -> dict[str, Any]:
    anchors, seed = run.settings.evaluation.error_anchors, run.settings.run.seed
    return error_on_training_data(run.settings, run.built, objective, anchors=anchors, seed=seed)


def estimator_errors(measured: dict[str, Any]) -> dict[str, float]:
    """`normalizer_error.method` and `.minibatch`; a method without an estimate has only the second."""
    return {f"normalizer_error.{name}": errors["mean"] for name, errors in measured["estimators"].items()}


def error_is_due(run: Run) -> bool:
    """Whether a multiple of `evaluation.error_every` has been passed since the last evaluation."""
    every, error_every = run.settings.evaluation.every, run.settings.evaluation.error_every
    latest = run.samples // every * every  # evaluations come at the first step past a multiple of `every`
    return bool(error_every) and latest // error_every > (latest - every) // error_every
