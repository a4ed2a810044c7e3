"""Measures DataComp's tasks on one model and writes each result to a file as soon as it is measured.

A file has the results of one model, a JSON line per task, in the format that DataComp's aggregation reads. A task is
not measured again while its result depends on the same weights and data.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from neuclip.data.faults import count_unindexed
from neuclip.data.held_out import TaskData, open_task, source_of
from neuclip.data.source import fingerprint
from neuclip.data.task_sets import DEFAULT_TEMPLATES, Puzzles, ZeroShotTask
from neuclip.distributed.collectives import all_gather_object, is_main
from neuclip.distributed.ranks import from_main_rank, main_rank_first, on_main_rank
from neuclip.errors import RunFailed, UserError
from neuclip.evaluation.embedding import Embedder
from neuclip.evaluation.tasks import TaskScore, measure_task, texts_of
from neuclip.files import reading, write_text
from neuclip.formatting import format_number, percent, plural
from neuclip.machine import versions
from neuclip.models.build import BuiltModel
from neuclip.progress import say
from neuclip.records import RunFolder, read_lines, strict
from neuclip.tasks import DEFAULT_PROMPTS, Average, Task, averages

FOLDER = "evaluations"  # in the working folder, for models that are not runs
# Fields of "meta". If all of them are equal, the result is the same.
OF_MODEL = ("weights", "model", "precision")
DEPENDS_ON = (*OF_MODEL, "data")

Line = dict[str, Any]


@dataclass(frozen=True)
class TaskResults:
    """The results of the chosen tasks, measured now or before. `lines` are in the order of DataComp's list."""

    file: Path
    lines: list[Line]
    averages: list[Average]
    missing: list[Task]  # tasks without data
    failed: dict[str, str]  # the reason, by name of the task

    def raise_failed(self) -> None:
        if self.failed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
            raise RunFailed(f"{plural(len(self.failed), 'task')} not measured: {reasons}")


def measure_tasks(embedder: Embedder, chosen: Sequence[Task], root: Path, file: Path) -> TaskResults:
    """Collective. Measure the `chosen` tasks whose data are below `root`, and write the results to `file`."""
    folders = find_folders(chosen, root)
    opened, failed = _open_all(folders)
    model = facts_of_model(embedder.built)
    facts = {task: model | facts_of_data(one) for task, one in opened.items()}
    known = from_main_rank(lambda: open_results(file, model))
    # Decided by the main rank: file times may differ between machines, but all ranks must measure the same tasks.
    changed = from_main_rank(lambda: {task.key for task in opened if not is_same(known.get(task.key), facts[task])})
    todo = {task: one for task, one in opened.items() if task.key in changed}
    if len(todo) < len(opened) and is_main():
        say(f"{plural(len(opened) - len(todo), 'task')} already measured with the same weights and data, in {file}")
    embedder.embed_texts([text for one in todo.values() for text in texts_of(one)], "embedding prompts of all tasks")
    for number, (task, one) in enumerate(todo.items(), start=1):
        started = time.monotonic()
        try:
            score = measure_task(embedder, task, one)
        except (UserError, RunFailed) as error:
            failed[task.name] = str(error)
            continue
        meta = facts[task] | {"versions": versions(), "seconds": time.monotonic() - started}
        known[task.key] = result_line(task, score, count_unindexed(source_of(one)), meta)
        on_main_rank(partial(write_results, file, known))
        if is_main():
            say(f"[{number} of {len(todo)}] {_progress_text(known[task.key], len(source_of(one)))}")
    lines = [known[task.key] for task in opened if task.name not in failed]
    return TaskResults(file, lines, averages(lines), [task for task in chosen if task not in folders], failed)


def find_folders(chosen: Sequence[Task], root: Path) -> dict[Task, Path]:
    """The folders of the tasks whose data are below the root. Raises UserError if there are none."""
    if not chosen:
        raise UserError("--tasks names no task; give datacomp for all, or one that neuclip data get --list shows")
    folders = {task: folder for task in chosen if (folder := task.find_folder(root))}
    if not folders:
        example = chosen[0].folder
        raise UserError(
            f"{root} has no data of these tasks, such as {example}; give another folder with --data, or download the "
            "data with neuclip data get"
        )
    return folders


def _open_all(folders: Mapping[Task, Path]) -> tuple[dict[Task, TaskData], dict[str, str]]:
    """Collective. Open the tasks' data; returns the opened tasks, and the reasons for those that failed. The main rank
    opens first, and the other ranks use the indexes that it writes."""

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


def result_line(task: Task, score: TaskScore, unindexed: int, meta: Mapping[str, Any]) -> Line:
    """The line of a task in the file of results."""
    counts = score.counts | {"skipped": unindexed + sum(fault.times for fault in score.faults)}
    summary = {"items": score.items(task), "metric": task.metric, "chance": score.chance}
    return {"key": task.key, "dataset": task.name, "metrics": score.metrics, "meta": {**meta, **counts, **summary}}


def _progress_text(line: Line, images: int) -> str:
    """'CIFAR-10: acc1 12.3 %, 10,000 images at 50/s'"""
    meta, speed = line["meta"], format_number(images / max(line["meta"]["seconds"], 1e-9))
    score = percent(line["metrics"]["main_metric"])
    return f"{line['dataset']}: {meta['metric']} {score}, {plural(images, 'image')} at {speed}/s"


# The file


def results_file(target: str) -> Path:
    """The default file for results: tasks.jsonl in the folder of a run, otherwise a file named after the model."""
    folder = RunFolder(target)
    if folder.settings.is_file():
        return folder.tasks
    name = re.sub(r"[^\w.]+", "-", target).strip("-.")
    return Path(FOLDER) / f"{name}.jsonl"


def check_output(path: Path) -> None:
    """Raise UserError if no file can be written to this path. Called before anything is measured."""
    if path.is_dir():
        raise UserError(f"--output {path} is a folder; give a file, such as {path / 'results.jsonl'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder of --output {path} cannot be created ({error.strerror}); give another file"
        ) from error


def open_results(path: Path, model: Mapping[str, str]) -> dict[str, Line]:
    """The results of this model by key of the task. A file with results of another model is renamed, because an average
    must not mix two models. It gets its name back when that model is measured again."""
    lines = read_results(path)
    other = next((line["meta"] for line in lines.values() if not is_same(line, model)), None)
    if other is None:
        return lines
    aside, earlier = _aside(path, {name: other.get(name) for name in OF_MODEL}), _aside(path, model)
    path.replace(aside)
    say(f"{path} had results of other weights; they are now in {aside}")
    if earlier.is_file():
        earlier.replace(path)
    return read_results(path)


def _aside(path: Path, model: Mapping[str, Any]) -> Path:
    return path.with_name(f"{path.stem}-{_sha256(dict(model))[:8]}{path.suffix}")


def read_results(path: Path) -> dict[str, Line]:
    """The results in a file by key of the task; {} if there is no file. Raises UserError for a file with anything
    else."""
    lines = read_lines(path)
    with reading(path, "give another --output, or move it away"):
        for number, line in enumerate(lines, start=1):
            values = [line["metrics"]["main_metric"], *line["metrics"].values()]
            if not (isinstance(line["key"], str) and isinstance(line["meta"]["weights"], str)):
                raise ValueError(f"line {number} names no task or no weights")
            if not all(value is None or isinstance(value, int | float) for value in values):
                raise ValueError(f"line {number} has metrics that are not numbers")
        return {line["key"]: line for line in lines}


def write_results(path: Path, lines: Mapping[str, Line]) -> None:
    """Write all results. The file is written anew each time: a line appended after an incomplete one (from a kill)
    would be lost, too."""
    write_text(path, "".join(json.dumps(strict(line), allow_nan=False) + "\n" for line in lines.values()))


# What a result depends on


def is_same(line: Line | None, facts: Mapping[str, Any]) -> bool:
    """Whether a result was measured with these facts. Facts that are not given are not compared."""
    return line is not None and all(line["meta"].get(name) == facts[name] for name in DEPENDS_ON if name in facts)


def facts_of_model(built: BuiltModel) -> dict[str, str]:
    """The fields OF_MODEL. Besides the weights, results depend on the activation (ViT-B-32 or ViT-B-32-quickgelu), the
    image preprocessing, the tokenizer, and the config of a text tower from transformers."""
    model: Any = built.towers.model
    text_config = getattr(getattr(model, "text", None), "config", None)
    computed = {
        "config": built.config,
        "preprocess": getattr(model.visual, "preprocess_cfg", {}),
        "tokenizer": _vocabulary(built.tokenize),
        "text": text_config.to_dict() if text_config else {},
    }
    for name in ("_name_or_path", "transformers_version"):  # depend on where and with which version it was loaded
        computed["text"].pop(name, None)
    precision = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {"weights": built.towers.weights_sha256(), "model": _sha256(computed), "precision": precision}


def _vocabulary(tokenize: Any) -> Any:
    """Everything that decides the tokens of a text; for a tokenizer from transformers, its serialized form."""
    inner = getattr(tokenize, "tokenizer", None)  # from transformers
    if inner is None:
        return getattr(tokenize, "encoder", {})
    compiled = getattr(inner, "backend_tokenizer", None)
    return compiled.to_str() if compiled else inner.get_vocab()


def facts_of_data(opened: TaskData) -> dict[str, str]:
    """`data`: a hash of the images (for shards, of their checksums; otherwise of names, sizes and times) and of the
    class names, templates, labels and groups, of the captions, or of the puzzles. `templates`: a hash of the
    templates."""
    images, unindexed = source_of(opened).images_version(), count_unindexed(source_of(opened))
    if isinstance(opened, ZeroShotTask):
        groups = None if opened.metadata is None else opened.metadata.tolist()
        data = _sha256([images, unindexed, opened.classnames, opened.templates, opened.labels, groups])
        is_default = opened.templates == list(DEFAULT_TEMPLATES)
        return {"data": data, "templates": DEFAULT_PROMPTS if is_default else _sha256(opened.templates)}
    if isinstance(opened, Puzzles):
        puzzles = [[puzzle.cue, puzzle.candidates, puzzle.associations] for puzzle in opened.puzzles]
        return {"data": _sha256([images, unindexed, puzzles])}
    return {"data": _sha256([images, unindexed, fingerprint(opened)[0]])}


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
