"""The records of finished jobs, one JSON line each in `results/runs.jsonl`. Pages are made from records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from neuclip import __version__
from neuclip.data.mixture import HELD_OUT_SUFFIX
from neuclip.experiments.definition import TRAIN, Choice, Flat, Job, typed_settings
from neuclip.records import RunFolder, append_line, read_lines
from neuclip.report.compare import Member, read_tasks
from neuclip.report.contents import Figures, RunContents, late_median, read_contents
from neuclip.report.measures import BATCH_ERROR_KEY, ERROR_KEY, MEAN_RECALL, RECALL, datasets

KEPT = ("seconds", "samples_per_second", "peak_memory_bytes", "temperature", "calibration", "samples_seen")
FILE = "runs.jsonl"
LATE = {  # medians over late steps: speed without start and evaluations, shares of a step's time, spread of weights
    "steady_samples_per_second": "samples_per_second",
    **{name: name for name in ("normalizer_share", "towers_share", "data_share", "weight_deviation")},
}
SLIM = ("samples", "top1", "images", "captions", "different_captions", "method", "minibatch")  # besides recall
Records = dict[str, dict[str, Any]]  # the newest record of each job, by its key


def read_records(results: Path) -> Records:
    """Read all records. A job that failed first and finished later counts as finished."""
    return {line["key"]: line for line in sorted(read_lines(results / FILE), key=lambda line: line["finished"])}


def record_finished(results: Path, job: Job, folder: Path, seconds: float) -> dict[str, Any]:
    run = RunFolder(folder)
    figures = record_of_run(run) if job.kind == TRAIN else {"evaluations": read_lines(run.evaluation)}
    record = {**about(job), "finished": True, "wall_seconds": round(seconds, 1), **figures}
    append_line(results / FILE, record)
    return record


def record_failed(results: Path, job: Job, reason: str) -> None:
    append_line(results / FILE, {**about(job), "finished": False, "error": reason})


def about(job: Job) -> dict[str, Any]:
    return {"key": job.key, "kind": job.kind, "case": job.case, "version": __version__, "settings": job.settings}


def record_of_run(folder: RunFolder) -> dict[str, Any]:
    """The figures of a run that pages show: a few hundred bytes per evaluation."""
    run = read_contents(folder)
    late = {name: late_median(run.records, key) for name, key in LATE.items()}
    tasks = read_tasks(folder.tasks) if folder.tasks.is_file() else {}
    return {
        "data": run.environment.get("data.sha256", ""),
        "summary": {name: run.summary.get(name) for name in KEPT} | {k: v for k, v in late.items() if v is not None},
        "evaluations": [slim(line) for line in run.evaluations],
        **({"tasks": tasks} if tasks else {}),
    }


def slim(figures: Figures) -> Figures:
    """An evaluation's recall at 1 and 10, accuracy, sizes and errors to six digits, and the mean recall@1 of both
    directions."""
    kept = {}
    for key, value in figures.items():
        metric = key.rpartition(".")[2]
        recall = RECALL.fullmatch(metric)
        if metric in SLIM or (recall and recall[2] in ("1", "10")):
            kept[key] = value
    for name in datasets(figures, ".*_recall_at_1"):
        both = ("image_to_different_text", "different_text_to_image")
        if f"{name}.{both[0]}_recall_at_1" not in figures:
            both = ("image_to_text", "text_to_image")
        kept[f"{name}.{MEAN_RECALL}"] = fmean(figures[f"{name}.{side}_recall_at_1"] for side in both)
    return {key: float(f"{value:.6g}") for key, value in kept.items()}


def main_figure(record: Mapping[str, Any], metric: str = MEAN_RECALL, *, of: str = "") -> float | None:
    """The last value of the metric on the first data set that has it and whose name ends with `of`."""
    final = record["evaluations"][-1] if record.get("evaluations") else {}
    return next((value for key, value in final.items() if key.endswith(f"{of}.{metric}")), None)


def tuning_figure(record: Mapping[str, Any], metric: str) -> float | None:
    """The metric on the held-out training pairs. The sets on which runs are reported choose nothing."""
    return main_figure(record, metric, of=HELD_OUT_SUFFIX)


def best_tries(tried: Mapping[Choice, Sequence[tuple[Flat, Job]]], records: Records, metric: str) -> dict[Choice, Flat]:
    """The try with the highest figure, for each case and variant whose tries have all ended. A failed try counts as
    zero."""
    best = {}
    for choice, candidates in tried.items():
        if all(job.key in records for _, job in candidates):
            figures = [tuning_figure(records[job.key], metric) or 0.0 for _, job in candidates]
            best[choice] = candidates[figures.index(max(figures))][0]
    return best


def member(job: Job, record: Mapping[str, Any]) -> Member:
    """A record in the form that `compare` takes. CLIP's estimate of a normalizer is the batch's."""
    settings, lines = typed_settings(job), record["evaluations"]
    if settings["objective.name"] == "clip":
        lines = [{ERROR_KEY: line[BATCH_ERROR_KEY], **line} if BATCH_ERROR_KEY in line else line for line in lines]
    run = RunContents(
        RunFolder(job.name),
        settings=settings | {"run.name": f"{job.variant}, seed {job.seed}", "run.seed": job.seed},
        environment={"data.sha256": record.get("data", "")},
        summary=record.get("summary", {"seconds": 0.0}),
        evaluations=lines,
    )
    return Member(run.name, Path(job.name), run, record.get("tasks", {}))
