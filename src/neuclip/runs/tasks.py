"""DataComp's tasks on any model: opens data and model once, measures task by task, keeps each result as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from neuclip.data.faults import count_unindexed
from neuclip.data.held_out import TaskData, open_task, source_of
from neuclip.data.task_sets import DEFAULT_TEMPLATES, ZeroShotTask
from neuclip.distributed.collectives import all_gather_object, is_main
from neuclip.distributed.ranks import main_rank_first, on_main_rank
from neuclip.errors import RunFailed, UserError
from neuclip.evaluation.averages import DEFAULT_PROMPTS, Average, averages
from neuclip.evaluation.embedding import Embedder
from neuclip.evaluation.tasks import Compat, Measured, measure_task, switches, texts_of
from neuclip.formatting import format_duration, format_number, percent, plural
from neuclip.machine import versions
from neuclip.runs.provenance import data_sha256, json_sha256, model_sha256, weights_sha256
from neuclip.runs.task_results import OF_MODEL, TaskFile
from neuclip.tasks import Task


@dataclass(frozen=True)
class TaskResults:
    """`lines` of the tasks that were asked for and are measured, now or before, in the order of DataComp's list."""

    file: Path
    lines: list[dict[str, Any]]
    averages: list[Average]
    missing: list[Task]  # no data
    failed: dict[str, str]  # by name of the task, why

    def raise_failed(self) -> None:
        if self.failed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
            raise RunFailed(f"{plural(len(self.failed), 'task')} not measured: {reasons}")


def measure_tasks(embedder: Embedder, chosen: Sequence[Task], root: Path, file: Path, compat: Compat) -> TaskResults:
    """Collective. A task whose line in `file` has the same weights, data and switches is not measured again."""
    folders = find_folders(chosen, root)
    opened, failed = _open_all(folders)
    shared = _provenance(embedder)
    facts = {task: shared | _facts(task, folders[task], one, compat) for task, one in opened.items()}
    results = TaskFile(file, {name: shared[name] for name in OF_MODEL})
    on_main_rank(results.set_others_aside)
    known = all_gather_object(results.known(facts) if is_main() else set())[0]
    if known and is_main():
        print(f"{plural(len(known), 'task')} in {file} already, of the same weights and data", file=sys.stderr)
    todo = {task: one for task, one in opened.items() if task.key not in known}
    embedder.embed_texts([text for one in todo.values() for text in texts_of(one)], "embedding prompts of all tasks")
    pace = Pace(len(todo), sum(len(source_of(one)) for one in todo.values()))
    for task, one in todo.items():
        started = time.monotonic()
        try:
            measured = measure_task(embedder, task, one, compat)
        except (UserError, RunFailed) as error:
            failed[task.name] = str(error)
            continue
        seconds = {"seconds": time.monotonic() - started}
        line = result_line(task, measured, count_unindexed(source_of(one)), facts[task] | seconds)
        on_main_rank(partial(results.write, line))
        pace.show(task, line, len(source_of(one)))
    stored = all_gather_object(results.read() if is_main() else [])[0]
    lines = [line for task in opened for line in stored if line["key"] == task.key and task.name not in failed]
    return TaskResults(file, lines, averages(lines), [task for task in chosen if task not in folders], failed)


def find_folders(chosen: Sequence[Task], root: Path) -> dict[Task, Path]:
    """Of the tasks whose data are below the root."""
    if not chosen:
        raise UserError("--tasks names no task; give datacomp for all, or one that neuclip data get --list shows")
    found = {task: folder for task in chosen if (folder := task.find_folder(root))}
    if not found:
        example = chosen[0].folder
        raise UserError(f"{root} has no data of these tasks, such as {example}; give --data ROOT, or: neuclip data get")
    return found


def _open_all(folders: dict[Task, Path]) -> tuple[dict[Task, TaskData], dict[str, str]]:
    """Collective. What can be opened, and why not of the rest. The other ranks find the indexes of the main rank."""

    def open_each() -> tuple[dict[Task, TaskData], dict[str, str]]:
        opened: dict[Task, TaskData] = {}
        failed: dict[str, str] = {}
        for task, folder in folders.items():
            try:
                opened[task] = open_task(task, folder)
            except (UserError, RunFailed) as error:
                failed[task.name] = str(error)
        return opened, failed

    opened, failed = main_rank_first(open_each)
    failed = {name: why for one in all_gather_object(failed) for name, why in one.items()}
    return {task: one for task, one in opened.items() if task.name not in failed}, failed


def _provenance(embedder: Embedder) -> dict[str, Any]:
    """What all results of a model depend on."""
    model = embedder.built.towers.model
    precision = str(next(model.parameters()).dtype).removeprefix("torch.")
    hashes = {"weights": weights_sha256(model), "model": model_sha256(embedder.built)}
    return {**hashes, "precision": precision, "versions": versions()}


def _facts(task: Task, folder: Path, opened: TaskData, compat: Compat) -> dict[str, Any]:
    """What the result of one task depends on beside the model."""
    facts: dict[str, Any] = {"data": data_sha256(folder, opened), "switches": switches(task, opened, compat)}
    if isinstance(opened, ZeroShotTask):
        own = opened.templates != list(DEFAULT_TEMPLATES)
        facts["templates"] = json_sha256(opened.templates) if own else DEFAULT_PROMPTS
    return facts


def result_line(task: Task, measured: Measured, unindexed: int, meta: dict[str, Any]) -> dict[str, Any]:
    counts = measured.counts | {"skipped": unindexed + sum(fault.times for fault in measured.faults)}
    meta = meta | counts | {"items": measured.items(task), "metric": measured.metric, "chance": measured.chance}
    return {"key": task.key, "dataset": task.name, "metrics": measured.metrics, "meta": meta}


@dataclass
class Pace:
    """Tells after each task how fast it went, and how long the rest will take at the pace of all so far."""

    tasks: int
    images: int
    done: int = 0
    images_done: int = 0
    seconds: float = 0.0

    def show(self, task: Task, line: dict[str, Any], images: int) -> None:
        meta, score = line["meta"], percent(line["metrics"]["main_metric"])
        self.done += 1
        self.images_done += images
        self.seconds += meta["seconds"]
        left = self.seconds / self.images_done * (self.images - self.images_done)
        rest = f", {format_duration(left)} left" if self.done < self.tasks else ""
        speed = format_number(images / max(meta["seconds"], 1e-9))
        if is_main():
            print(
                f"[{self.done} of {self.tasks}] {task.name}: {meta['metric']} {score}, "
                f"{plural(images, 'image')} at {speed}/s{rest}",
                file=sys.stderr,
            )
