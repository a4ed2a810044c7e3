"""`neuclip eval`, `neuclip error`"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from neuclip.cli.command import Count, check_target, find_run, is_main_rank, print_json
from neuclip.errors import UserError
from neuclip.formatting import UNKNOWN, format_count, format_number, percent, plural
from neuclip.report.findings import judge_error
from neuclip.report.page import Table, text_table
from neuclip.report.terminal import WIDTH, figures_lines, held_out_skipped
from neuclip.tasks import Average, default_root

if TYPE_CHECKING:
    from neuclip.runs.evaluate import Evaluation, TaskResults

NOT_MEASURED = ": not measured"  # end of the reason for a task that an average lacks altogether
# Metrics shown below the main one, for tasks whose published results are computed otherwise than intended.
BESIDE = ("acc_worst_region_without_other", "acc1_blank_classnames_keep")


def evaluate(
    target: str,
    *,
    retrieval: tuple[str, ...] | None = None,
    zero_shot: tuple[str, ...] | None = None,
    data: str = "",
    tasks: str = "",
    output: str = "",
    batch_size: Annotated[int | None, {"at_least": 1}] = None,
    max_bad_share: Annotated[float | None, {"at_least": 0, "at_most": 1}] = None,
    evaluation_image_column: str | None = None,
    evaluation_caption_column: str | None = None,
    evaluation_caption_key: str | None = None,
    json: bool = False,
) -> int:
    """neuclip eval RUN|CHECKPOINT|MODEL [--retrieval DATA,...] [--zero-shot FOLDER,...] [--tasks NAME,...]

    Measures retrieval (recall@k in both directions) and zero-shot accuracy, each with its chance level. Without flags,
    it measures the held-out sets of the run's settings; --retrieval and --zero-shot choose other data, and --tasks
    DataComp's 38 tasks.
    The model is the folder of a run, one of its checkpoints, a saved open_clip model (local-dir:FOLDER), a model on the
    Hugging Face hub (hf-hub:NAME), or MODEL:WEIGHTS, where WEIGHTS is an open_clip tag or a file. Models on the hub and
    open_clip tags are downloaded if necessary. To allow other downloads, too, set HF_HUB_OFFLINE=0 in the environment.

    --retrieval: held-out pairs to measure recall on, DATA or NAME=DATA; none: measure no recall
        [default: as in the run]
    --zero-shot: classification sets, FOLDER or NAME=FOLDER; none: measure no accuracy [default: as in the run]
    --data: folder with the data of DataComp's tasks [default: the one that neuclip data get writes to]
    --tasks: DataComp tasks to measure: datacomp (all 38), imagenet (7), retrieval (2), vtab (13), or names of tasks
        [default: datacomp if --data or --output is given]
    --output: file for the results of the tasks [default: RUN/tasks.jsonl, or evaluations/MODEL.jsonl]
    --batch-size: images per forward pass [default: as in the run]
    --max-bad-share: skip data sets with a larger share of bad samples [default: as in the run]
    --evaluation.image_column: tables: column of images or image paths [default: as in the run]
    --evaluation.caption_column: tables: caption columns, separated by commas [default: as in the run]
    --evaluation.caption_key: shards: key of the captions in json members [default: as in the run]

    neuclip eval runs/first --retrieval 'shards/{00020..00021}.tar' --zero-shot none --json
    neuclip eval ViT-B-32:weights.safetensors --data evaluation-sets --tasks imagenet,retrieval
    """
    check_target(target)
    own_data = {
        "retrieval": retrieval,
        "zero_shot": zero_shot,
        "image_column": evaluation_image_column,
        "caption_column": evaluation_caption_column,
        "caption_key": evaluation_caption_key,
    }
    wants_tasks = bool(data or tasks or output)
    wants_own_data = not wants_tasks or any(value is not None for value in own_data.values())
    from neuclip import api

    chosen = api.Datacomp(data or default_root(), tasks or "datacomp", output) if wants_tasks else None
    overrides: dict[str, Any] = {**own_data, "batch_size": batch_size, "max_bad_share": max_bad_share}
    measured, results = api.measure(target, held_out=wants_own_data, datacomp=chosen, **overrides)
    if not is_main_rank():
        return 0
    if json:
        print_json(as_json_object(measured, results))
    else:
        print_figures(measured, results)
    if measured:
        measured.raise_refused()
    if results:
        results.raise_failed()
    return 0


def as_json_object(measured: Evaluation | None, results: TaskResults | None) -> dict[str, Any]:
    """The flat figures of the held-out sets; if tasks were measured, an object with both."""
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
        for line in figures_lines(measured.figures):
            print(line)
        for name, text in held_out_skipped(measured.figures, measured.skipped).items():
            print(f"{name}: {text}")
    if results:
        print(tasks_table(results.lines), end="")
        if results.averages:
            print(f"\n{averages_table(results.averages)}", end="")
        if results.missing:
            names = ", ".join(task.key.rpartition("/")[2] for task in results.missing)
            print(textwrap.fill(f"Without data (neuclip data get NAME): {names}", WIDTH, subsequent_indent="  "))
        print(f"Results: {results.file}")


def tasks_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A table with a row per task: its main metric and the chance level."""
    rows = []
    for line in lines:
        meta, metrics = line["meta"], line["metrics"]
        skipped = f" ({format_count(meta['skipped'])} skipped)" if meta["skipped"] else ""
        shown = [in_percent(metrics["main_metric"]), in_percent(meta["chance"])]
        rows.append([line["dataset"], meta["metric"], *shown, f"{format_count(meta['images'])}{skipped}"])
        for name in BESIDE:
            if name in metrics:
                rows.append([f"  {name.replace('_', ' ')}", "", in_percent(metrics[name]), "", ""])
    return text_table(Table("", ["task", "metric", "%", "chance", "images"], rows, text_columns=2))


def averages_table(averages: Sequence[Average]) -> str:
    """A table of the averages, then the reasons for incomplete tasks. A group with missing tasks has no value, because
    a mean over the others would look like the group's."""
    rows = []
    for average in averages:
        total = format_count(average.members)
        in_part = ", in part" if any(not reason.endswith(NOT_MEASURED) for reason in average.lacking) else ""
        tasks = total if average.value is not None else f"{format_count(average.measured)} of {total}{in_part}"
        rows.append([average.name, in_percent(average.value), in_percent(average.chance), tasks])
    incomplete = [reason for average in averages[:1] for reason in average.lacking if not reason.endswith(NOT_MEASURED)]
    return text_table(Table("", ["average", "%", "chance", "tasks"], rows)) + "".join(f"{one}\n" for one in incomplete)


def in_percent(share: float | None) -> str:
    """A percentage with two decimals, as papers print it."""
    return UNKNOWN if share is None else f"{100 * share:.2f}"


def error(
    run: str,
    *runs: str,
    eps: Annotated[float | None, {"at_least": 0}] = None,
    anchors: Count = 10_000,
    checkpoints: Count = 5,
    seed: int = 0,
    json: bool = False,
) -> int:
    """neuclip error RUN... [--eps X] [--anchors N] [--checkpoints N]

    Measures how far the normalizers of each run are from the exact ones, which are computed over its whole training
    data. Prints the mean squared error of the log-normalizers; smaller is better. All runs are measured at the same
    anchors, with the same eps and after the same numbers of samples. To compare several checkpoints, train the runs
    with --checkpoint.milestones, which keeps them.

    --eps: constant that is added to every normalizer inside the logarithm [default: the largest eps of the runs]
    --anchors: number of pairs whose normalizers are computed exactly
    --checkpoints: number of checkpoints to measure, evenly spaced among those that all runs have; 1: only the last
    --seed: seed for drawing the anchors

    neuclip error runs/neuclip runs/fastclip runs/clip
    neuclip error runs/first --checkpoints 1 --anchors 2000 --json
    """
    folders = [find_run(name).path for name in (run, *runs)]
    paths = [folder.resolve() for folder in folders]
    if twice := [folder for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1]:
        raise UserError(f"{twice[0]} is given twice; give each run once")
    from neuclip import api

    errors = api.normalizer_errors(folders, eps=eps, anchors=anchors, checkpoints=checkpoints, seed=seed)
    if (measured := len(errors["runs"][0]["checkpoints"])) < checkpoints:
        print(
            f"measured {measured} of {plural(checkpoints, 'checkpoint')}: the runs have no more at equal numbers of "
            f"samples; train with --checkpoint.milestones {checkpoints} to keep them",
            file=sys.stderr,
        )
    if json:
        return print_json(errors)
    print(error_text(errors), end="")
    return 0


def error_text(errors: dict[str, Any]) -> str:
    """A description of the measure, a verdict per run, and a line per checkpoint."""
    eps = errors["eps"]
    head = (
        "mean over anchors of (log estimate - log exact normalizer)^2, images and texts averaged; 0 is exact\n"
        f"eps {format_number(eps)} for all; {plural(errors['anchors'], 'anchor')} (seed {errors['seed']})\n"
    )
    verdicts, rows = "", []
    for run in errors["runs"]:
        verdicts += f"{run['run']}, {run['objective']}, batch {format_count(run['batch_size'])}: {verdict(run, eps)}\n"
        for one in run["checkpoints"]:
            method, batch = (one["estimators"].get(name, {}) for name in ("method", "minibatch"))
            figures = [one["temperature"], *(method.get(key) for key in ("image", "text", "mean")), batch.get("mean")]
            cells = map(format_number, figures)
            rows.append([run["run"], format_count(one["samples"]), *cells, percent(one["share_at_floor"])])
    floor = "at floor: share of anchors whose exact normalizer is below e times eps, where eps dominates\n"
    columns = ["run", "samples", "tau", "image", "text", "error", "of a batch", "at floor"]
    return "\n".join([head, verdicts, text_table(Table("", columns, rows)) + floor])


def verdict(run: Mapping[str, Any], eps: float) -> str:
    judged = judge_error(run["mean"].get("method"), run["mean"]["minibatch"])
    notes = [one["method_note"] for one in run["checkpoints"] if "method_note" in one]
    trained = "" if run["own_eps"] == eps else f" (trained with eps {format_number(run['own_eps'])})"
    return (f"the error is {judged}" if judged else (notes or ["nothing to judge"])[0]) + trained
