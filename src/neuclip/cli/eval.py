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

NOT_MEASURED = ": not measured"  # how the reason ends why an average lacks a task
# Metrics shown beside the main one: where published results are counted otherwise than they are meant.
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

    Measures retrieval (recall@k, in both directions) and zero-shot accuracy, with chance beside each figure:
    on data of your own, or on DataComp's 38 tasks. Give the folder of a run, one of its checkpoints, a saved open_clip
    model (local-dir:FOLDER), a model of the hub (hf-hub:NAME), or MODEL:WEIGHTS with a tag of open_clip or a file. What
    is not on this machine is downloaded only with HF_HUB_OFFLINE=0 in the environment.

    --retrieval: held-out pairs, DATA or NAME=DATA, or none [default: as in the run]
    --zero-shot: classification sets, FOLDER or NAME=FOLDER, or none [default: as in the run]
    --data: folder with the data of DataComp's tasks [default: where neuclip data get puts them]
    --tasks: datacomp (38), imagenet (7), retrieval (2), vtab (13), or names of tasks [default: datacomp]
    --output: file of the tasks' results [default: RUN/tasks.jsonl, or evaluations/MODEL.jsonl]
    --batch-size: images per forward pass [default: as in the run]
    --max-bad-share: skip data sets with a larger share of bad samples [default: as in the run]
    --evaluation.image_column: tables: column of images or their paths [default: as in the run]
    --evaluation.caption_column: tables: columns of captions [default: as in the run]
    --evaluation.caption_key: shards: key of the captions in json members [default: as in the run]

    neuclip eval runs/first --retrieval 'shards/{00020..00021}.tar' --zero-shot none --json
    neuclip eval ViT-B-32:weights.safetensors --data evaluation-sets --tasks imagenet,retrieval
    """
    check_target(target)
    of_own_data = {
        "retrieval": retrieval,
        "zero_shot": zero_shot,
        "image_column": evaluation_image_column,
        "caption_column": evaluation_caption_column,
        "caption_key": evaluation_caption_key,
    }
    wants_tasks = bool(data or tasks or output)
    wants_own_data = not wants_tasks or any(value is not None for value in of_own_data.values())
    from neuclip import api

    chosen = api.Datacomp(data or default_root(), tasks or "datacomp", output) if wants_tasks else None
    overrides: dict[str, Any] = {**of_own_data, "batch_size": batch_size, "max_bad_share": max_bad_share}
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
            print(textwrap.fill(f"Not there (neuclip data get NAME): {names}", WIDTH, subsequent_indent="  "))
        print(f"Results: {results.file}")


def tasks_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """One row per task, its main metric beside what chance would reach."""
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
    """A group of which tasks are missing has no value: a mean over the rest would look like the group's."""
    rows = []
    for average in averages:
        of = format_count(average.members)
        in_part = ", in part" if any(not reason.endswith(NOT_MEASURED) for reason in average.lacking) else ""
        tasks = of if average.value is not None else f"{format_count(average.measured)} of {of}{in_part}"
        rows.append([average.name, in_percent(average.value), in_percent(average.chance), tasks])
    short = [reason for average in averages[:1] for reason in average.lacking if not reason.endswith(NOT_MEASURED)]
    return text_table(Table("", ["average", "%", "chance", "tasks"], rows)) + "".join(f"{one}\n" for one in short)


def in_percent(share: float | None) -> str:
    """Two decimals, as papers print it."""
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

    Compares the runs' normalizers with the exact ones, computed over their whole training data.
    Prints the mean squared error of their logarithms at the same anchors, with one eps for all, at equal numbers of
    samples seen; smaller is better. Checkpoints to compare are kept by --checkpoint.milestones of `neuclip train`.

    --eps: added to every normalizer, inside the logarithm [default: the largest of the runs' own]
    --anchors: pairs whose normalizers are computed exactly
    --checkpoints: how many checkpoints to measure, evenly spaced, of those that all runs have; 1: the last
    --seed: seed that chooses the anchors

    neuclip error runs/neuclip runs/fastclip runs/clip
    neuclip error runs/first --checkpoints 1 --anchors 2000 --json
    """
    folders = [find_run(name).path for name in (run, *runs)]
    places = [folder.resolve() for folder in folders]
    if twice := [folder for folder, place in zip(folders, places, strict=True) if places.count(place) > 1]:
        raise UserError(f"{twice[0]} is given twice; give each run once")
    from neuclip import api

    errors = api.normalizer_errors(folders, eps=eps, anchors=anchors, checkpoints=checkpoints, seed=seed)
    if (measured := len(errors["runs"][0]["checkpoints"])) < checkpoints:
        print(
            f"{measured} of {plural(checkpoints, 'checkpoint')} measured: there are no more at equal numbers of "
            f"samples; train with --checkpoint.milestones {checkpoints} to keep them",
            file=sys.stderr,
        )
    if json:
        return print_json(errors)
    print(error_text(errors), end="")
    return 0


def error_text(errors: dict[str, Any]) -> str:
    """What was measured, a verdict per run, and a line per checkpoint; --json has more."""
    eps = errors["eps"]
    head = (
        "mean over anchors of (log estimate - log exact normalizer)^2, images and texts averaged; 0 is exact\n"
        f"eps {format_number(eps)} for all; {plural(errors['anchors'], 'anchor')} (seed {errors['seed']})\n"
    )
    verdicts, rows = "", []
    for run in errors["runs"]:
        verdicts += f"{run['run']}, {run['objective']}, batch {format_count(run['batch_size'])}: {verdict(run, eps)}\n"
        for found in run["checkpoints"]:
            method, batch = (found["estimators"].get(name, {}) for name in ("method", "minibatch"))
            figures = [found["temperature"], *(method.get(key) for key in ("image", "text", "mean")), batch.get("mean")]
            cells = map(format_number, figures)
            rows.append([run["run"], format_count(found["samples"]), *cells, percent(found["share_at_floor"])])
    floor = "at floor: anchors whose exact normalizer is below e times eps; there eps decides\n"
    columns = ["run", "samples", "tau", "image", "text", "error", "of a batch", "at floor"]
    return "\n".join([head, verdicts, text_table(Table("", columns, rows)) + floor])


def verdict(run: Mapping[str, Any], eps: float) -> str:
    judged = judge_error(run["mean"].get("method"), run["mean"]["minibatch"])
    notes = [found["method_note"] for found in run["checkpoints"] if "method_note" in found]
    own = "" if run["own_eps"] == eps else f" (trained with eps {format_number(run['own_eps'])})"
    return (f"the error is {judged}" if judged else (notes or ["nothing to judge"])[0]) + own
