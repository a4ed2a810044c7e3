"""`neuclip eval`"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuclip.cli.flags import JSON, Command, Flag
from neuclip.cli.runs import runs_beside
from neuclip.cli.tables import aligned, figures_table, print_json
from neuclip.datasets.evaluation_sets import default_root
from neuclip.errors import UserError
from neuclip.formatting import UNKNOWN, format_count
from neuclip.records import RunFolder
from neuclip.runs.summary import held_out_skipped
from neuclip.settings.sections import RunSettings
from neuclip.settings.writing import WIDTH
from neuclip.tasks import Average

if TYPE_CHECKING:
    from neuclip.runs.evaluate import Evaluation, TaskResults

COLUMNS = {
    "image_column": "tables: column of images or their paths",
    "caption_column": "tables: columns of captions",
    "caption_key": "shards: key of the captions in json members",
}
OF_TASKS = ("data", "tasks", "output")
OF_BOTH = ("batch_size", "max_bad_share")
NOT_MEASURED = ": not measured"  # how the reason ends why an average lacks a task
# Metrics shown beside the main one: where published results are counted otherwise than they are meant.
BESIDE = ("acc_worst_region_without_other", "acc1_blank_classnames_keep")

COMMAND = Command(
    usage="eval RUN|CHECKPOINT|MODEL [--retrieval DATA,...] [--zero-shot FOLDER,...] [--data ROOT [--tasks NAME,...]]",
    about="""Measures retrieval (recall@k, in both directions) and zero-shot accuracy, with chance beside each figure:
on data of your own, or on DataComp's 38 tasks. Give the folder of a run, one of its checkpoints, a saved open_clip
model (local-dir:FOLDER), a model of the hub (hf-hub:NAME), or MODEL:WEIGHTS with a tag of open_clip or a file. What is
not on this machine is downloaded only with HF_HUB_OFFLINE=0 in the environment.""",
    flags=(
        Flag("retrieval", tuple[str, ...], "held-out pairs, DATA or NAME=DATA, or none [default: as in the run]"),
        Flag(
            "zero-shot", tuple[str, ...], "classification sets, FOLDER or NAME=FOLDER, or none [default: as in the run]"
        ),
        Flag("data", str, "folder with the data of DataComp's tasks [where neuclip data get puts them]"),
        Flag("tasks", str, "datacomp (38), imagenet (7), retrieval (2), vtab (13), or names of tasks [datacomp]"),
        Flag("output", str, "file of the tasks' results [RUN/tasks.jsonl, or evaluations/MODEL.jsonl]"),
        Flag("batch-size", int, "images per forward pass [default: as in the run]", at_least=1),
        Flag(
            "max-bad-share",
            float,
            "skip data sets with a larger share of bad samples [default: as in the run]",
            at_least=0,
            at_most=1,
        ),
        *(Flag(f"evaluation.{name}", str, f"{what} [default: as in the run]") for name, what in COLUMNS.items()),
        JSON,
    ),
    examples=(
        "neuclip eval runs/first --retrieval 'shards/{00020..00021}.tar' --zero-shot none --json",
        "neuclip eval ViT-B-32:weights.safetensors --data evaluation-sets --tasks imagenet,retrieval",
    ),
)


def run(arguments: Sequence[str]) -> int:
    (target,), values = COMMAND.parse(arguments)
    check_target(target)
    as_json = values.pop(JSON.name, False)
    of_tasks = {name: values.pop(name) for name in OF_TASKS if name in values}
    if of_tasks:
        of_tasks = {"data": default_root(), **of_tasks}
    from neuclip import api

    own = {name.removeprefix("evaluation."): value for name, value in values.items()}
    held_out = not of_tasks or any(name not in OF_BOTH for name in own)
    datacomp = api.Datacomp(**of_tasks) if of_tasks else None
    measured, results = api.measure(target, held_out=held_out, datacomp=datacomp, **own)
    if os.environ.get("RANK", "0") != "0":  # of several ranks only one prints
        return 0
    if as_json:
        print_json(as_json_object(measured, results))
    else:
        print_figures(measured, results)
    for one in (measured and measured.raise_refused, results and results.raise_failed):
        if one:
            one()
    return 0


def as_json_object(measured: Evaluation | None, results: TaskResults | None) -> dict[str, Any]:
    """Flat figures of one's own data; with tasks they have a place beside them."""
    figures = measured.figures if measured else {}
    if results is None:
        return figures
    return {
        "figures": figures,
        "tasks": results.lines,
        "averages": [asdict(average) for average in results.averages],
        "missing": [task.key for task in results.missing],
        "failed": results.failed,
        "file": str(results.file),
    }


def print_figures(measured: Evaluation | None, results: TaskResults | None) -> None:
    if measured:
        print(figures_table(measured.figures), end="")
        for name, text in held_out_skipped(measured.figures, measured.skipped).items():
            print(f"{name}: {text}")
    if results:
        print(tasks_table(results.lines), end="")
        if results.averages:
            print(f"\n{averages_table(results.averages)}", end="")
        if results.missing:
            names = ", ".join(task.key.rpartition("/")[2] for task in results.missing)
            print(textwrap.fill(f"Not there (neuclip data get NAME): {names}", WIDTH, subsequent_indent="  "))
        print(f"Results: {results.file}")


def tasks_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """One row per task, its main metric beside what chance would reach."""
    rows = [["task", "metric", "%", "chance", "images"]]
    for line in lines:
        meta, metrics = line["meta"], line["metrics"]
        skipped = f" ({format_count(meta['skipped'])} skipped)" if meta["skipped"] else ""
        shown = [in_percent(metrics["main_metric"]), in_percent(meta["chance"])]
        rows.append([line["dataset"], meta["metric"], *shown, f"{format_count(meta['images'])}{skipped}"])
        for name in BESIDE:
            if name in metrics:
                rows.append([f"  {name.replace('_', ' ')}", "", in_percent(metrics[name])])
    return aligned(rows)


def averages_table(averages: Sequence[Average]) -> str:
    """A group of which tasks are missing has no value: a mean over the rest would look like the group's."""
    rows = [["average", "%", "chance", "tasks"]]
    for average in averages:
        of = format_count(average.members)
        in_part = ", in part" if any(not reason.endswith(NOT_MEASURED) for reason in average.lacking) else ""
        tasks = of if average.value is not None else f"{format_count(average.measured)} of {of}{in_part}"
        rows.append([average.name, in_percent(average.value), in_percent(average.chance), tasks])
    short = [reason for average in averages[:1] for reason in average.lacking if not reason.endswith(NOT_MEASURED)]
    return aligned(rows) + "".join(f"{reason}\n" for reason in short)


def in_percent(share: float | None) -> str:
    """Two decimals, as papers print it."""
    return UNKNOWN if share is None else f"{100 * share:.2f}"


def check_target(target: str) -> None:
    """A path must exist; a bare word may be the name of a model, which only open_clip knows."""
    is_path = os.sep in target and ":" not in target  # local-dir:/a/b is a model
    is_run_elsewhere = RunFolder(Path(RunSettings.folder) / target).settings.is_file()
    if (is_path or is_run_elsewhere) and not Path(target).exists():
        raise UserError(f"no run or checkpoint at {target}; {runs_beside(Path(target))}")
