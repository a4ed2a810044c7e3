"""The flat keys of an evaluation, `DATASET.METRIC`, gathered by data set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from neuclip.report.contents import RunContents, number, section

DIRECTIONS = {"image_to_text": "image to text", "text_to_image": "text to image"}
RETRIEVAL_METRIC = re.compile(r"(image_to_text|text_to_image)_(recall|chance)_at_(\d+)")


@dataclass
class Retrieval:
    """Recall of one held-out set: `recall["image_to_text", 1]`, and what guessing would give."""

    dataset: str
    images: float | None = None
    skipped: float | None = None
    recall: dict[tuple[str, int], float | None] = field(default_factory=dict)
    chance: dict[tuple[str, int], float | None] = field(default_factory=dict)


@dataclass
class ZeroShot:
    """Figures of one classification task, absent ones None: top1, top5, mean_per_class, chance, images, classes,
    skipped."""

    dataset: str
    figures: dict[str, float | None] = field(default_factory=dict)

    def __getitem__(self, metric: str) -> float | None:
        return self.figures.get(metric)


@dataclass
class Evaluation:
    """One evaluation, in the order in which its keys were written."""

    samples: float | None
    retrieval: list[Retrieval]
    zero_shot: list[ZeroShot]
    others: dict[str, float | None]  # figures this page has no table for, by their full key

    @property
    def counts_skipped(self) -> bool:
        """Runs of earlier versions did not count what held-out sets lost."""
        return any(one.skipped is not None for one in self.retrieval) or any(
            task["skipped"] is not None for task in self.zero_shot
        )


def parse_evaluation(figures: Mapping[str, Any], samples: float | None = None) -> Evaluation:
    """`{"a.image_to_text_recall_at_1": 0.1, "b.top1": 0.4}` gives one Retrieval for a and one ZeroShot for b."""
    by_dataset: dict[str, dict[str, float | None]] = {}
    for key, value in figures.items():
        dataset, dot, metric = str(key).rpartition(".")
        if dot:
            by_dataset.setdefault(dataset, {})[metric] = number(value)
    found = Evaluation(samples, [], [], {})
    for dataset, metrics in by_dataset.items():
        if any(RETRIEVAL_METRIC.fullmatch(metric) for metric in metrics):
            add_retrieval(found, dataset, metrics)
        elif "top1" in metrics:
            found.zero_shot.append(ZeroShot(dataset, metrics))
        else:
            found.others.update({f"{dataset}.{metric}": value for metric, value in metrics.items()})
    return found


def add_retrieval(found: Evaluation, dataset: str, metrics: dict[str, float | None]) -> None:
    retrieval = Retrieval(dataset)
    for metric, value in metrics.items():
        if match := RETRIEVAL_METRIC.fullmatch(metric):
            direction, kind, k = match.groups()
            (retrieval.recall if kind == "recall" else retrieval.chance)[direction, int(k)] = value
        elif metric == "images":
            retrieval.images = value
        elif metric == "skipped":
            retrieval.skipped = value
        else:
            found.others[f"{dataset}.{metric}"] = value
    found.retrieval.append(retrieval)


def all_evaluations(run: RunContents) -> list[Evaluation]:
    """Every evaluation of the run, oldest first; the summary's joins as the last one unless it is already there."""
    found = [
        parse_evaluation({key: value for key, value in line.items() if key not in ("samples", "step")}, samples)
        for line in run.evaluations
        if (samples := number(line.get("samples"))) is not None
    ]
    final = section(run.summary.get("evaluation"))
    if final:
        samples_seen = number(run.summary.get("samples_seen")) or run.samples_seen
        if found and found[-1].samples == samples_seen:
            found.pop()
        found.append(parse_evaluation(final, samples_seen))
    return found
