"""Small run folders and task results for comparisons, written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from neuclip.records import RunFolder, write_json
from neuclip.tasks import tasks
from tests.report.sample_run import write_lines

BATCH, SAMPLES = 100, 1000
SET = "icons/new"


def write_run(
    path: Path,
    recalls: Sequence[float],
    *,
    seed: int = 0,
    objective: str = "clip",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    errors: Sequence[float] = (),
    data: str = "same data",
    extra: Mapping[str, float] | None = None,
    finished: bool = True,
) -> Path:
    """A run whose image-to-text recall@1 was `recalls`, at even intervals up to its last sample, the others less."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": path.name, "folder": str(path.parent), "seed": seed},
        "data": {"train": "icons"},
        "model": {"name": "tiny"},
        "objective": {"name": objective},
        "train": {"batch_size": BATCH, "samples": SAMPLES},
    }
    for section, values in (settings or {}).items():
        sections[section] |= values
    folder.settings.write_text(yaml.safe_dump(sections, sort_keys=False))
    budget = sections["train"]["samples"]
    steps = range(BATCH, budget + 1, BATCH)
    write_lines(
        folder.records,
        [
            {"samples": samples, "loss": 5 - samples / budget, "temperature": 0.07, "calibration": 1.1, "accuracy": 0.5}
            for samples in steps
        ],
    )
    evaluations = []
    for index, recall in enumerate(recalls):
        figures = {f"{SET}.image_to_text_recall_at_1": recall, f"{SET}.text_to_image_recall_at_1": recall / 2}
        figures |= {f"{SET}.image_to_text_recall_at_5": 2 * recall, f"{SET}.image_to_text_chance_at_1": 0.001}
        figures |= {f"{SET}.images": 1000, f"{SET}.captions": 1000, "kinds.top1": recall, "kinds.chance": 0.1}
        evaluations.append({"samples": budget * (index + 1) / len(recalls)} | figures | (extra or {}))
    for evaluation, error in zip(evaluations, errors, strict=False):
        evaluation["normalizer_error.method"] = error
    write_lines(folder.evaluation, evaluations)
    if finished:
        final = {key: value for key, value in evaluations[-1].items() if "." in key} if evaluations else {}
        summary: dict[str, Any] = {"samples_seen": budget, "evaluation": final, "samples_per_second": 50.0}
        if errors:
            summary["normalizer_error"] = {"eps": 1e-6, "estimators": {"method": {"mean": errors[-1]}}}
        write_json(folder.summary, summary)
    write_json(folder.environment, {"data": {"count": 10_000, "sha256": data}})
    return path


def write_results(path: Path, *, add: float = 0.0, leave_out: int = 0, meta: Mapping[str, Any] | None = None) -> Path:
    """Main metrics 0.01, 0.02, ... of DataComp's tasks as its own files hold them, without those at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = tasks()[: len(tasks()) - leave_out]
    lines: list[dict[str, Any]] = [
        {"key": task.key, "dataset": task.name, "metrics": {"acc5": 0.9, "main_metric": (place + 1) / 100 + add}}
        for place, task in enumerate(kept)
    ]
    if meta is not None:  # as we write them
        lines = [line | {"meta": meta} for line in lines]
    lines.append({"key": "fairness/fairface", "dataset": "FairFace", "metrics": {"main_metric": None}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
