"""Figures of a run, a checkpoint or a model on held-out sets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from neuclip.data.held_out import HeldOutSets
from neuclip.errors import UserError
from neuclip.evaluation.embedding import Embedder
from neuclip.evaluation.runner import Evaluation, evaluate_held_out
from neuclip.runs.target import open_target


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
