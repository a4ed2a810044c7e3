"""Evaluate a run, a checkpoint or a model: on held-out sets, and on DataComp's tasks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from neuclip.data.held_out import HeldOutSets
from neuclip.data.open import local_only
from neuclip.distributed.ranks import process_group, raise_on_main, sync_errors
from neuclip.errors import UserError
from neuclip.evaluation.embedding import Embedder
from neuclip.evaluation.held_out import Evaluation, evaluate_held_out
from neuclip.evaluation.task_results import TaskResults, check_output, find_folders, measure_tasks, results_file
from neuclip.machine import choose_device, set_threads
from neuclip.runs.load import open_target
from neuclip.runs.results import open_held_out
from neuclip.settings.sections import Settings
from neuclip.tasks import choose_tasks


class Overrides(TypedDict, total=False):
    """Overrides of the run's settings; None leaves them as they are."""

    retrieval: tuple[str, ...] | None
    zero_shot: tuple[str, ...] | None
    batch_size: int | None
    max_bad_share: float | None
    image_column: str | None
    caption_column: str | None
    caption_key: str | None


@dataclass(frozen=True)
class Datacomp:
    """An evaluation on DataComp: the folder with the data, the tasks, and the file for the results (default: that of
    `results_file`)."""

    data: str | Path = "."
    tasks: str = "datacomp"
    output: str | Path = ""


def measure(
    target: str, *, held_out: bool = True, datacomp: Datacomp | None = None, **overrides: Unpack[Overrides]
) -> tuple[Evaluation | None, TaskResults | None]:
    """Measure a model that `open_target` can open: on its held-out sets, with the reason for each refused set, and on
    `datacomp`. Under torchrun all ranks call it and share the work.

    The result of each task is written to a file when it is ready. Tasks with a result there are not measured again.
    """
    changes: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    with process_group(choose_device("auto")):
        with sync_errors():
            file = check_datacomp(target, datacomp) if datacomp else None  # before loading the model, which takes long
            built, settings = open_target(target)
            set_threads(settings.run.threads, built.towers.device)
        limit = changes.pop("max_bad_share", settings.data.max_bad_share)
        settings = replace(settings, evaluation=replace(settings.evaluation, **changes))
        embedder = Embedder(built, settings.evaluation.batch_size, settings.data.workers, max_bad_share=limit)
        sets = _open_sets(target, settings, by_user="retrieval" in changes) if held_out else None
        evaluation = evaluate_held_out(embedder, sets) if sets else None
        if datacomp is None or file is None:
            return evaluation, None
        return evaluation, measure_tasks(embedder, choose_tasks(datacomp.tasks), Path(datacomp.data), file)


def check_datacomp(target: str, datacomp: Datacomp) -> Path:
    """The file for the results. UserError if the tasks or their data do not exist, or the file cannot be written."""
    find_folders(choose_tasks(datacomp.tasks), Path(datacomp.data))
    file = Path(datacomp.output or results_file(target))
    check_output(file)
    return file


def _open_sets(target: str, settings: Settings, *, by_user: bool) -> HeldOutSets:
    """Open the held-out sets. Collective. Sets that the user names are downloaded; those that a run names are not,
    because it may be a stranger's run."""
    with nullcontext() if by_user else local_only(target, ", or give --retrieval"):
        sets = open_held_out(settings)
    if not (sets.retrieval or sets.zero_shot):
        raise_on_main(
            UserError(
                f"nothing to evaluate {target} on; give --retrieval DATA, --zero-shot FOLDER, or --data ROOT with "
                "DataComp's tasks"
            )
        )
    return sets
