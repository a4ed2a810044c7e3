"""The commands as functions: `neuclip.train`, `neuclip.evaluate`, `neuclip.load`, and others for the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Unpack

from torch import nn

from neuclip.distributed.ranks import from_main_rank, process_group, stop_requests
from neuclip.evaluation.task_results import TaskResults
from neuclip.machine import choose_device
from neuclip.models.towers import Tokenize
from neuclip.models.transforms import Transform
from neuclip.runs import lifecycle, results
from neuclip.runs.build import resolve
from neuclip.runs.error import normalizer_errors
from neuclip.runs.evaluate import Datacomp, Overrides, measure
from neuclip.runs.folder import run_to_continue
from neuclip.runs.load import open_target
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings
from neuclip.training import loop
from neuclip.training.stored_features import store_features

__all__ = ["Datacomp", "evaluate", "load", "measure", "measure_datacomp", "normalizer_errors", "train"]


def train(settings: Settings | None = None, *, resume: Path | Literal["auto"] | None = None) -> Path:
    """Train with `settings` (default: recipe tiny), or resume the run in the folder `resume`; "auto" resumes the run
    called `run.name` if it exists, and otherwise starts it. Returns the run's folder.

    Under torchrun every rank calls this function: together they train one run, and the main rank writes its files.

    >>> folder = train(read_settings(None, ["--train.samples", "20k"]))        # doctest: +SKIP
    """
    local_settings = settings or read_settings()
    with stop_requests() as stop, process_group(choose_device(local_settings.run.device)):
        # All ranks use the settings of the main rank.
        settings, folder = from_main_rank(lambda: (resolve(local_settings), run_to_continue(local_settings, resume)))
        sets = results.open_held_out(settings)
        with lifecycle.open_run(settings, folder, stop) as run:
            results.say_before_training(run, sets)
            store_features(run, stop)
            results.evaluate_missed(run, sets)
            loop.train(
                run,
                stop,
                evaluate=lambda run: results.evaluate_on_the_way(run, sets),
                save=lambda run: lifecycle.save(run, stop),
            )
            results.finish(run, sets)
    return run.folder.path


def evaluate(target: str, **overrides: Unpack[Overrides]) -> dict[str, float]:
    """Evaluate a run, a checkpoint or a model on held-out data. A model is `local-dir:FOLDER`, `hf-hub:NAME`, or
    `MODEL:WEIGHTS` with a tag of open_clip or the path of a file. `overrides` replace settings of the run. Returns the
    metrics by name.

    The metric `skipped` of each set is the number of samples that could not be used. Raises RunFailed if there are too
    many of them.

    >>> evaluate("runs/first", retrieval=("shards/{00020..00021}.tar",))        # doctest: +SKIP
    """
    evaluation, _ = measure(target, **overrides)
    assert evaluation is not None
    evaluation.raise_refused()
    return evaluation.figures


def measure_datacomp(
    target: str, *, data: str | Path, tasks: str = "datacomp", output: str | Path = "", **overrides: Unpack[Overrides]
) -> TaskResults:
    """Evaluate a run, a checkpoint or a model on those of DataComp's tasks whose data are in the folder `data`. Results
    are saved to a file after each task; tasks that are already in the file are not evaluated again.

    >>> measure_datacomp("runs/first", data="evaluation-sets", tasks="imagenet,retrieval")        # doctest: +SKIP
    """
    _, results = measure(target, held_out=False, datacomp=Datacomp(data, tasks, output), **overrides)
    assert results is not None
    return results


def load(target: str) -> tuple[nn.Module, Transform, Tokenize]:
    """The open_clip model of a target as in `evaluate`, with its transform and tokenizer.

    >>> model, transform, tokenizer = load("runs/first")        # doctest: +SKIP
    """
    built, _ = open_target(target)
    return built.towers.model.eval(), built.float_transform, built.tokenize
