"""The flat keys of an evaluation, `DATASET.METRIC`, grouped by data set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neuclip.formatting import format_count, plural
from neuclip.report.contents import RunContents, as_dict, number

DIRECTIONS = {"image_to_text": "image to text", "text_to_image": "text to image"}
# Where captions repeat, recall over different captions is measured too.
DIFFERENT = {
    "image_to_different_text": "image to text, different captions",
    "different_text_to_image": "text to image, different captions",
}
ALL_DIRECTIONS = DIRECTIONS | DIFFERENT
RETRIEVAL_METRIC = re.compile(rf"(?:{'|'.join(ALL_DIRECTIONS)})_(?:(?:recall|chance)_at_(\d{{1,9}})|median_rank)")
CANDIDATES = {
    "image_to_text": "captions",
    "text_to_image": "images",
    "image_to_different_text": "different captions",
    "different_text_to_image": "images",
}
DEFINITION = "an image is right if any of its captions is among the first k of all, a caption if its image is"
DIFFERENT_DEFINITION = "over different captions, equal ones count once and every image that has the text is right"
COUNTS = ("images", "captions", "different_captions", "skipped")  # a set that was refused has nothing else


@dataclass(frozen=True)
class HeldOutSet:
    """What was measured on one held-out set: `held_out["top1"]`, None where it was not."""

    name: str
    metrics: dict[str, float | None]

    def __getitem__(self, metric: str) -> float | None:
        return self.metrics.get(metric)

    def recall_and_chance(self, direction: str, k: int = 1) -> tuple[float | None, float | None]:
        return self[f"{direction}_recall_at_{k}"], self[f"{direction}_chance_at_{k}"]

    def depths(self, direction: str) -> list[int]:
        """Every k of which there is a recall@k, ascending."""
        return sorted(
            int(match[1])
            for metric, value in self.metrics.items()
            if value is not None and (match := re.fullmatch(rf"{direction}_recall_at_(\d{{1,9}})", metric))
        )

    def candidates(self, direction: str) -> float | None:
        return self[CANDIDATES[direction].replace(" ", "_")]

    @property
    def size(self) -> str:
        """'1,000 images, 5,000 captions, 5 per image'; what is not known is left out."""
        counts = {noun: self[f"{noun}s"] for noun in ("image", "caption")}
        known = [plural(count, noun) for noun, count in counts.items() if count is not None]
        return ", ".join(filter(None, (*known, self.captions_per_image)))

    @property
    def captions_per_image(self) -> str:
        """'5 per image', '5.01 per image'; empty where it is not known, and of earlier versions, which counted equal
        captions once."""
        images, captions = self["images"], self["captions"]
        return f"{captions / images:.3g} per image" if images and captions and captions >= images else ""

    @property
    def definitions(self) -> list[str]:
        """When a query is right, of each definition by which there are figures."""
        images, captions = self["images"], self["captions"]
        # Every image has a caption: with fewer, equal ones were merged, as earlier versions did.
        merged = images is not None and captions is not None and captions < images
        different = merged or any(self.depths(direction) for direction in DIFFERENT)
        return [*([] if merged else [DEFINITION]), *([DIFFERENT_DEFINITION] if different else [])]

    @property
    def first_figures(self) -> dict[str, float]:
        """Recall@1 in both directions, or top-1 accuracy: the figures to judge a change by, with their names."""
        keys = {f"{direction}_recall_at_1": f"recall@1, {words}" for direction, words in DIRECTIONS.items()}
        keys["top1"] = "top-1"
        return {words: value for key, words in keys.items() if (value := self[key]) is not None}

    def median_rank(self, direction: str) -> str:
        """'8 of 960'; empty where it was not measured (earlier versions)."""
        rank, candidates = self[f"{direction}_median_rank"], self.candidates(direction)
        if rank is None:
            return ""
        return format_count(rank) + (f" of {format_count(candidates)}" if candidates is not None else "")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation; the sets are in the order in which their keys were written."""

    samples: float | None
    retrieval: list[HeldOutSet] = field(default_factory=list)
    zero_shot: list[HeldOutSet] = field(default_factory=list)
    others: dict[str, float | None] = field(default_factory=dict)  # without a table of their own, by full key

    def find(self, name: str) -> HeldOutSet | None:
        return next((one for one in (*self.retrieval, *self.zero_shot) if one.name == name), None)

    @property
    def counts_skipped(self) -> bool:
        """Earlier versions did not count the skipped samples of held-out sets."""
        return any(held_out["skipped"] is not None for held_out in (*self.retrieval, *self.zero_shot))


def parse_evaluation(figures: Mapping[str, Any], samples: float | None = None) -> Evaluation:
    """`{"a.image_to_text_recall_at_1": 0.1, "b.top1": 0.4}` has retrieval on a and zero-shot classification on b."""
    by_dataset: dict[str, dict[str, float | None]] = {}
    for key, value in figures.items():
        dataset, dot, metric = str(key).rpartition(".")
        if dot:
            by_dataset.setdefault(dataset, {})[metric] = number(value)
    evaluation = Evaluation(samples)
    for dataset, metrics in by_dataset.items():
        others = {key: value for key, value in metrics.items() if key not in COUNTS}
        if any(map(RETRIEVAL_METRIC.fullmatch, metrics)):
            evaluation.retrieval.append(HeldOutSet(dataset, metrics))
            others = {key: value for key, value in others.items() if not RETRIEVAL_METRIC.fullmatch(key)}
        elif "top1" in metrics:
            evaluation.zero_shot.append(HeldOutSet(dataset, metrics))
            others = {}
        evaluation.others.update({f"{dataset}.{metric}": value for metric, value in others.items()})
    return evaluation


def all_evaluations(run: RunContents) -> list[Evaluation]:
    """Every evaluation of the run, oldest first; that of the summary is the last, and is not listed twice."""
    evaluations = [
        parse_evaluation({key: value for key, value in line.items() if key not in ("samples", "step")}, samples)
        for line in run.evaluations
        if (samples := number(line.get("samples"))) is not None
    ]
    final = as_dict(run.summary.get("evaluation"))
    if final:
        samples_seen = number(run.summary.get("samples_seen")) or run.samples_seen
        if evaluations and evaluations[-1].samples == samples_seen:
            evaluations.pop()
        evaluations.append(parse_evaluation(final, samples_seen))
    return evaluations


def before_training(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """What the model knew before the first step, where evaluation.at_start measured it; None before there is more."""
    return evaluations[0] if len(evaluations) > 1 and evaluations[0].samples == 0 else None


def merge_evaluations(run: RunContents) -> list[Evaluation]:
    """What `neuclip merge --curve` measured, with the weight of this run in the place of the samples; rising."""
    lines = [
        parse_evaluation({key: value for key, value in line.items() if key != "weight"}, weight)
        for line in run.merges
        if (weight := number(line.get("weight"))) is not None and 0 <= weight <= 1
    ]
    return sorted(lines, key=lambda one: one.samples or 0.0)
