"""Run folders as training leaves them, with made-up but plausible values and drawn thumbnails; and small ones, with the
figures that a comparison is about."""

from __future__ import annotations

import base64
import io
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from neuclip.records import RunFolder, read_lines, write_json, write_lines
from neuclip.tasks import tasks

BATCH, STEPS, LOG_EVERY = 128, 4000, 10
COLOURS = ("red", "orange", "green", "blue", "purple", "black")
SMALL_BATCH, FEW_SAMPLES, SET = 100, 1000, "icons/new"  # of small runs
HELD_OUT = ("icons-30k/new-drawings", "icons-30k/new-concepts")
SETTINGS: dict[str, dict[str, Any]] = {
    "run": {"name": "2026-11-16-neuclip-tiny", "folder": "runs", "seed": 0, "device": "auto", "threads": 2},
    "data": {"train": "icons-30k", "workers": 2, "crop_scale": [0.9, 1.0], "max_bad_share": 0.05},
    "model": {"name": "tiny", "pretrained": "", "image_size": 0, "gradient_checkpointing": False},
    "objective": {"name": "neuclip", "num_prototypes": 1024, "restart_every": 500, "inner_steps": 10, "eps": 1.0e-6},
    "optimizer": {"learning_rate": 1.5e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.98, "warmup": 0.05},
    "temperature": {"initial": 0.07, "minimum": 0.01, "learning_rate": 1.25e-4, "schedule": "constant"},
    "train": {"batch_size": BATCH, "samples": BATCH * STEPS + 60},
    "evaluation": {"retrieval": ["auto"], "zero_shot": ["auto"], "every": 64000, "gallery": 12},
    "checkpoint": {"every_samples": 0, "every_minutes": 15.0, "keep": 2},
    "log": {"every": LOG_EVERY, "tensorboard": False, "wandb": False},
}


def training_record(step: int, noise: random.Random) -> dict[str, Any]:
    done = step / STEPS
    towers, normalizer = 0.80 + noise.gauss(0, 0.01), 0.12 + noise.gauss(0, 0.01)
    warm = min(1.0, done / 0.05)
    since_restart = step % 500 / 500
    return {
        "samples": step * BATCH,
        "step": step,
        "epoch": step * BATCH / 27500,
        "loss": 0.9 * math.exp(-5 * done) - 0.55 * done + noise.gauss(0, 0.05),
        "temperature": 0.03 + 0.04 * math.exp(-4 * done),
        "learning_rate": 1.5e-3 * warm * 0.5 * (1 + math.cos(math.pi * done)),
        "accuracy": min(1.0, max(0.0, 0.85 * (1 - math.exp(-4 * done)) + noise.gauss(0, 0.03))),
        "calibration": math.exp(3 * math.exp(-25 * done) + 0.4 * (1 - since_restart) ** 6 + noise.gauss(0, 0.08)),
        "samples_per_second": 512 + noise.gauss(0, 14),
        "data_share": 0.05 + 0.02 * math.exp(-30 * done),
        "towers_share": towers,
        "normalizer_share": normalizer,
        "gradient_norm": 0.6 + 3 * math.exp(-12 * done) * math.exp(noise.gauss(0, 0.25)),
        "mean_log_normalizer_image": -3.1 * done,
        "share_at_eps": 0.04 * done,
        "capped": 0.0,
        "truncated_captions": 0.013,
    }


def evaluation_figures(done: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    for dataset, reach, images in zip(HELD_OUT, (0.42, 0.11), (1143, 158), strict=True):
        for direction, factor in (("image_to_text", 1.0), ("text_to_image", 0.88)):
            for k in (1, 5, 10):
                recall = reach * factor * (1 - math.exp(-3 * done)) * k**0.3
                figures[f"{dataset}.{direction}_recall_at_{k}"] = recall
                figures[f"{dataset}.{direction}_chance_at_{k}"] = k / (images * 0.84)
            figures[f"{dataset}.{direction}_median_rank"] = round(images * math.exp(-6 * reach * factor - done))
        figures |= {f"{dataset}.images": images, f"{dataset}.captions": round(images * 0.84)}
    for task, reach, classes in (("groups", 0.61, 9), ("subgroups", 0.29, 88)):
        name, top1 = f"icons-30k/zero-shot/{task}", reach * (1 - math.exp(-4 * done))
        figures |= {f"{name}.top1": top1, f"{name}.top5": min(1.0, 1.6 * top1), f"{name}.mean_per_class": 0.9 * top1}
        figures |= {f"{name}.chance": 1 / classes, f"{name}.largest_class": 2 / classes}
        figures |= {f"{name}.images": 1301, f"{name}.classes": classes}
    return figures


FIGURES_AT_END = evaluation_figures(1.0)


def thumbnail(colour: str) -> str:
    stored = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(stored, "PNG")
    return "data:image/png;base64," + base64.b64encode(stored.getvalue()).decode()


def gallery(queries: int = 12) -> dict[str, Any]:
    """In both directions, the right answer at rank 1, 2, ... 6, of which five are shown, and again."""
    found: dict[str, Any] = {"dataset": HELD_OUT[0], "image_to_text": [], "text_to_image": []}
    for place in range(queries):
        rank = place % 6 + 1
        matches = [
            {"caption": f"a flat {colour} icon", "score": 0.6 - shown / 10, "right": shown + 1 == rank}
            for shown, colour in enumerate(COLOURS[:5])
        ]
        query = {"caption": f"a flat {COLOURS[rank - 1]} icon", "rank": rank}
        found["image_to_text"].append(query | {"image": thumbnail(COLOURS[rank - 1]), "matches": matches})
        images = [match | {"image": thumbnail(colour)} for match, colour in zip(matches, COLOURS, strict=False)]
        found["text_to_image"].append(query | {"matches": images})
    return found


def change_json(path: Path, **changes: Any) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


def write_sample_run(path: Path) -> RunFolder:
    """A finished NeuCLIP run. Tests take away or change what they are about."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    noise = random.Random(1)
    folder.settings.write_text(yaml.safe_dump(SETTINGS, sort_keys=False))
    write_lines(folder.records, [training_record(step, noise) for step in range(LOG_EVERY, STEPS + 1, LOG_EVERY)])
    evaluations = [
        {"samples": step * BATCH, "step": step}
        | evaluation_figures(step / STEPS)
        | {"normalizer_error.method": 480 / step, "normalizer_error.minibatch": 1.9}
        for step in range(500, STEPS + 1, 500)
    ]
    write_lines(folder.evaluation, evaluations)
    errors = {"image": 0.11, "text": 0.13, "mean": 0.12, "mean_without_duplicates": 0.09}
    of_batch = {"image": 1.8, "text": 2.0, "mean": 1.9, "mean_without_duplicates": 0.21}
    summary = {
        "samples_seen": STEPS * BATCH,
        "loss": -0.54,
        "temperature": 0.0307,
        "calibration": 1.0664,
        "seconds": 1043.2,
        "samples_per_second": 508.3,
        "peak_memory_bytes": 1_421_000_000,
        "skipped": {"cannot decode": 1},
        "evaluation": evaluation_figures(1.0),
        "normalizer_error": {
            "anchors": 5000,
            "eps": 1e-6,
            "temperature": 0.0307,
            "duplicates": 1200,
            "share_at_floor": 0.1,
            "estimators": {"method": errors, "minibatch": of_batch},
        },
    }
    write_json(folder.summary, summary)
    versions = {"neuclip": "0.1.0", "torch": "2.13.0", "open_clip_torch": "3.3.0", "python": "3.11.9"}
    data = {"count": 27500, "sha256": "9f2c" * 16}
    facts = {"started": "2026-11-16T21:05:09+02:00", "device": "cpu", "threads": 2}
    write_json(folder.environment, facts | {"versions": versions, "data": data})
    write_json(folder.gallery, gallery())
    return folder


def make_fine_tuned(folder: RunFolder) -> None:
    """Give a sample run what fine-tuning adds: an evaluation before the first step, and a curve of merged models on the
    new data, which rises, and on the old, which falls."""
    start = {key: 0.3 * value if "recall" in key or "top" in key else value for key, value in FIGURES_AT_END.items()}
    start |= {f"{HELD_OUT[1]}.image_to_text_recall_at_1": 0.44}
    write_lines(folder.evaluation, [{"samples": 0, "step": 0} | start, *read_lines(folder.evaluation)])
    merged = [
        {"weight": step / 10} | {key: x + step / 10 * (FIGURES_AT_END[key] - x) for key, x in start.items()}
        for step in range(11)
    ]
    write_lines(folder.merges, merged)


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
        "train": {"batch_size": SMALL_BATCH, "samples": FEW_SAMPLES},
    }
    for section, values in (settings or {}).items():
        sections[section] |= values
    folder.settings.write_text(yaml.safe_dump(sections, sort_keys=False))
    budget = sections["train"]["samples"]
    steps = range(SMALL_BATCH, budget + 1, SMALL_BATCH)
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
