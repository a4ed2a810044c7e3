"""Figures of a run, a checkpoint or a model: on held-out sets of one's own, and on DataComp's tasks."""

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
    """Which of DataComp's tasks are measured, on the data below which folder, and into which file (default: that of
    the run or model)."""

    data: str | Path = "."
    tasks: str = "datacomp"
    output: str | Path = ""


def measure(
    target: str, *, held_out: bool = True, datacomp: Datacomp | None = None, **overrides: Unpack[Overrides]
) -> tuple[Evaluation | None, TaskResults | None]:
    """Measure whatever `open_target` opens, which is built once: on its held-out sets, with the reason for each set
    that is refused, and on `datacomp`. Under torchrun all ranks call it and share the work.

    Results of tasks are kept in a file task by task; what is there already is not measured again.
    """
    given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    with process_group(choose_device("auto")):
        with sync_errors():
            file = check_datacomp(target, datacomp) if datacomp else None  # before the model, which takes long
            built, settings = open_target(target)
            set_threads(settings.run.threads, built.towers.device)
        limit = given.pop("max_bad_share", settings.data.max_bad_share)
        settings = replace(settings, evaluation=replace(settings.evaluation, **given))
        embedder = Embedder(built, settings.evaluation.batch_size, settings.data.workers, max_bad_share=limit)
        sets = _open_sets(target, settings, by_user="retrieval" in given) if held_out else None
        evaluation = evaluate_held_out(embedder, sets) if sets else None
        if datacomp is None or file is None:
            return evaluation, None
        return evaluation, measure_tasks(embedder, choose_tasks(datacomp.tasks), Path(datacomp.data), file)


def check_datacomp(target: str, datacomp: Datacomp) -> Path:
    """The file for its results. UserError where there are no such tasks, none of their data, or no such file."""
    find_folders(choose_tasks(datacomp.tasks), Path(datacomp.data))
    file = Path(datacomp.output or results_file(target))
    check_output(file)
    return file


def _open_sets(target: str, settings: Settings, *, by_user: bool) -> HeldOutSets:
    """Collective. What the user names is fetched; what a run names, which may be a stranger's, is not."""
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
