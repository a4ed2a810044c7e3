"""The records of finished jobs, one JSON line each in `results/runs.jsonl`; pages are made from them alone."""

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
LATE = {  # of a step: its speed without start and evaluations, shares of its time, how unequal weights of anchors are
    "steady_samples_per_second": "samples_per_second",
    **{name: name for name in ("normalizer_share", "towers_share", "data_share", "weight_deviation")},
}
Records = dict[str, dict[str, Any]]  # by the job's key; the newest of each


def read_records(results: Path) -> Records:
    """Of a job that failed and finished later, that it finished."""
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
    """What pages show of a run: a few hundred bytes per evaluation."""
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
    """Recall, accuracy, sizes and errors of an evaluation, and the mean of both directions; six digits."""
    kept = {
        key: value
        for key, value in figures.items()
        if RECALL.fullmatch(metric := key.rpartition(".")[2])
        or metric in ("samples", "top1", "images", "captions", "different_captions", "method", "minibatch")
    }
    for name in datasets(figures, ".*_recall_at_1"):
        both = ("image_to_different_text", "different_text_to_image")
        if f"{name}.{both[0]}_recall_at_1" not in figures:
            both = ("image_to_text", "text_to_image")
        kept[f"{name}.{MEAN_RECALL}"] = fmean(figures[f"{name}.{side}_recall_at_1"] for side in both)
    return {key: float(f"{value:.6g}") for key, value in kept.items()}


def main_figure(record: Mapping[str, Any], metric: str = MEAN_RECALL, *, of: str = "") -> float | None:
    """The last value of the metric on the first set that has it and whose name ends with `of`."""
    final = record["evaluations"][-1] if record.get("evaluations") else {}
    return next((value for key, value in final.items() if key.endswith(f"{of}.{metric}")), None)


def tuning_figure(record: Mapping[str, Any], metric: str) -> float | None:
    """On the training pairs that are held out: the sets on which runs are reported choose nothing."""
    return main_figure(record, metric, of=HELD_OUT_SUFFIX)


def best_tries(tried: Mapping[Choice, Sequence[tuple[Flat, Job]]], records: Records, metric: str) -> dict[Choice, Flat]:
    """Of each case and variant whose tries have all been run, the one with the highest figure; one that failed has
    none."""
    found = {}
    for choice, candidates in tried.items():
        if all(job.key in records for _, job in candidates):
            figures = [tuning_figure(records[job.key], metric) for _, job in candidates]
            found[choice] = candidates[max(range(len(figures)), key=lambda number: figures[number] or 0.0)][0]
    return found


def member(job: Job, record: Mapping[str, Any]) -> Member:
    """As `compare` takes it. CLIP's own estimate of a normalizer is the batch's."""
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
