"""Figures of a run, a checkpoint or a model: on held-out sets of one's own, and on DataComp's tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack

from neuclip.distributed.ranks import process_group, raise_on_main, sync_errors
from neuclip.errors import UserError
from neuclip.evaluation.embedding import Embedder
from neuclip.evaluation.runner import Evaluation, evaluate_held_out
from neuclip.evaluation.tasks import Compat
from neuclip.machine import choose_device, set_threads
from neuclip.models.towers import BuiltModel
from neuclip.runs.results import open_held_out
from neuclip.runs.target import open_target
from neuclip.runs.task_results import refuse_unwritable, results_file
from neuclip.runs.tasks import TaskResults, find_folders, measure_tasks
from neuclip.settings.sections import Settings
from neuclip.tasks import choose_tasks


class Given(TypedDict, total=False):
    """What is said instead of the run's settings; None is the same as nothing."""

    retrieval: tuple[str, ...] | None
    zero_shot: tuple[str, ...] | None
    batch_size: int | None
    max_bad_share: float | None
    image_column: str | None
    caption_column: str | None
    caption_key: str | None


def measure(target: str, **given: Unpack[Given]) -> Evaluation:
    """Held-out figures of whatever `open_target` opens, with the reason for each set that is refused. What is not given
    comes from the run's settings. Under torchrun all ranks call it and share the work."""
    limit = given.pop("max_bad_share", None)
    known = {name: value for name, value in given.items() if value is not None}
    with process_group(choose_device("auto")):
        with sync_errors():
            built, settings = open_target(target)
        evaluation = replace(settings.evaluation, **known)  # type: ignore[arg-type]
        sets = open_held_out(replace(settings, evaluation=evaluation))
        if not (sets.retrieval or sets.zero_shot):
            raise_on_main(
                UserError(
                    f"nothing to evaluate {target} on; give --retrieval DATA, --zero-shot FOLDER, or --data ROOT with "
                    "DataComp's tasks"
                )
            )
        return evaluate_held_out(_embedder(built, settings, evaluation.batch_size, limit), sets)


def measure_datacomp(
    target: str,
    *,
    data: str | Path = ".",
    tasks: str = "datacomp",
    compat: Compat = "datacomp",
    output: str | Path = "",
    batch_size: int | None = None,
    max_bad_share: float | None = None,
) -> TaskResults:
    """DataComp's tasks, or those named, whose data are below `data`. Results are kept in a file task by task; what is
    there already is not measured again."""
    with process_group(choose_device("auto")):
        with sync_errors():
            chosen = choose_tasks(tasks)
            find_folders(chosen, Path(data))  # before the model, which takes long
            file = Path(output or results_file(target))
            refuse_unwritable(file)
            built, settings = open_target(target)
        embedder = _embedder(built, settings, batch_size or settings.evaluation.batch_size, max_bad_share)
        return measure_tasks(embedder, chosen, Path(data), file, compat)


def _embedder(built: BuiltModel, settings: Settings, batch_size: int, max_bad_share: float | None) -> Embedder:
    set_threads(settings.run.threads, built.towers.device)
    limit = settings.data.max_bad_share if max_bad_share is None else max_bad_share
    return Embedder(built, batch_size, settings.data.workers, max_bad_share=limit)
