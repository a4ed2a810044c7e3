"""The commands as functions: `neuclip.train`, `neuclip.evaluate`, `neuclip.load`, and what the command line adds."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from neuclip.distributed.error_sync import process_group, sync_errors
from neuclip.distributed.same_settings import require_same_settings
from neuclip.distributed.stopping import stop_requests
from neuclip.models.towers import Tokenize, Transform
from neuclip.plan import choose_device
from neuclip.runs import lifecycle, results
from neuclip.runs.build import absolute_paths, resolve_held_out
from neuclip.runs.error import normalizer_errors
from neuclip.runs.evaluate import measure
from neuclip.runs.target import open_target
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings
from neuclip.training import loop

__all__ = ["evaluate", "load", "measure", "normalizer_errors", "train"]


def train(settings: Settings | None = None, *, resume: Path | None = None) -> Path:
    """Train as `settings` say (default: recipe tiny), or continue the run `resume`. Returns the run's folder.

    Under torchrun every rank calls it: they train one run together, and the main rank writes.

    >>> folder = train(read_settings(None, ["--train.samples", "20k"]))        # doctest: +SKIP
    """
    settings = settings or read_settings()
    with stop_requests(), process_group(choose_device(settings.run.device)):
        with sync_errors():
            settings = absolute_paths(resolve_held_out(settings))
        require_same_settings(settings, resuming=resume is not None)
        sets = results.open_held_out(settings)
        with lifecycle.open_run(settings, resume) as run:
            loop.train(run, evaluate=lambda run: results.evaluate_on_the_way(run, sets), save=lifecycle.save)
            results.finish(run, sets)
    return run.folder.path


def evaluate(
    target: str,
    *,
    retrieval: tuple[str, ...] | None = None,
    zero_shot: tuple[str, ...] | None = None,
    batch_size: int | None = None,
    max_bad_share: float | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    caption_key: str | None = None,
) -> dict[str, float]:
    """Held-out figures of a run, a checkpoint or `local-dir:FOLDER`. What is not given comes from the run's settings.

    Each set has a figure `skipped`: the samples that could not be used. Too many of them raise RunFailed.

    >>> evaluate("runs/first", retrieval=("shards/{00020..00021}.tar",))        # doctest: +SKIP
    """
    evaluation = measure(
        target,
        retrieval=retrieval,
        zero_shot=zero_shot,
        batch_size=batch_size,
        max_bad_share=max_bad_share,
        image_column=image_column,
        caption_column=caption_column,
        caption_key=caption_key,
    )
    evaluation.raise_refused()
    return evaluation.figures


def load(target: str) -> tuple[nn.Module, Transform, Tokenize]:
    """The open_clip model of a run, a checkpoint or `local-dir:FOLDER`, with its transform and tokenizer.

    >>> model, transform, tokenizer = load("runs/first")        # doctest: +SKIP
    """
    built, _ = open_target(target)
    return built.towers.model.eval(), built.float_transform, built.tokenize
