"""Measures a model on one of DataComp's 38 tasks: the metrics that DataComp reports, under its names.

The main metric is computed as in all published results. For FMoW and CLEVR Distance, DataComp's code computes something
else than intended: their results have both values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from neuclip.data.held_out import TaskData
from neuclip.data.source import Fault, Source
from neuclip.data.task_sets import Puzzles, ZeroShotTask
from neuclip.errors import UserError
from neuclip.evaluation.classification import (
    Predictions,
    classifier,
    group_shares,
    guess_shares,
    macro_f1,
    mean_per_class_recall,
    predict,
    prompts,
    share,
    worst_group,
)
from neuclip.evaluation.embedding import Embedder
from neuclip.evaluation.retrieval import recall
from neuclip.tasks import Task

# FMoW's regions are Asia, Europe, Africa, the Americas, Oceania and Other. DataComp intends to leave out Other, which
# has four test images, but its evaluator compares the regions' numbers with a name, and leaves out nothing.
OTHER_REGION = 5
WITHOUT_OTHER = "acc_worst_region_without_other"
# CLEVR Distance has an empty class name. DataComp drops it, so that later classes get other numbers than their labels.
WITH_BLANK = "acc1_blank_classnames_keep"
TOP_FIVE_GROUPS, WORST_REGION, WORST_GROUP, MACRO_F1 = "acc_top5_wg", "acc_worst_region", "acc_wg", "F1-macro_all"
GROUPED = (WORST_REGION, WORST_GROUP, TOP_FIVE_GROUPS)
DIRECTIONS = {"image_retrieval": "text_to_image", "text_retrieval": "image_to_text"}  # DataComp's name: ours
PUZZLE_SIZES = {"5": (5, 5), "6": (6, 6), "10": (10, 10), "12": (12, 12), "5-6": (0, 6), "10-12": (10, 10**9)}

Metrics = dict[str, float | None]


@dataclass(frozen=True)
class TaskScore:
    """The result of a task. The main metric, which the averages use, is also in `metrics` as main_metric."""

    metrics: Metrics
    chance: float | None  # chance level of the main metric on these data
    counts: dict[str, int]  # measured images, classes, captions, puzzles
    faults: tuple[Fault, ...]  # the skipped samples

    def items(self, task: Task) -> int:
        """The number of puzzles or images, which is comparable with the size in the table of tasks."""
        return self.counts["puzzles" if task.kind == "puzzles" else "images"]


def measure_task(embedder: Embedder, task: Task, opened: TaskData) -> TaskScore:
    """Measure a task. Raises TooManyBadSamples if more than the embedder's `max_bad_share` of the images cannot be
    used."""
    what = f"evaluating on {task.name}"
    if isinstance(opened, ZeroShotTask):
        return _classify(embedder, task, opened, what)
    return _solve(embedder, opened, task, what) if isinstance(opened, Puzzles) else _retrieve(embedder, opened, what)


def texts_of(opened: TaskData) -> list[str]:
    """The prompts of a task; [] for retrieval, whose captions are read with the images."""
    if isinstance(opened, ZeroShotTask):
        return prompts(opened.classnames, opened.templates)
    return [cue_prompt(puzzle.cue) for puzzle in opened.puzzles] if isinstance(opened, Puzzles) else []


def _classify(embedder: Embedder, task: Task, opened: ZeroShotTask, what: str) -> TaskScore:
    weights = classifier(embedder, opened.classnames, opened.templates)
    images = embedder.embed_images(opened.source, what)
    embedder.check_bad_share(opened.source, images.faults)
    labels = torch.tensor(opened.labels)[images.ids]
    groups = _groups(task, opened, images.ids)
    has_name = torch.tensor([bool(name) for name in opened.classnames])
    named = weights[has_name]
    metrics = classification_metrics(task, predict(images.features, named, labels), labels, len(named), groups)
    if not has_name.all():
        metrics[WITH_BLANK] = share(predict(images.features, weights, labels).ranks == 1)
    metrics["main_metric"] = metrics[task.metric]
    counts = {"images": len(labels), "classes": len(opened.classnames)}
    return TaskScore(metrics, chance_of(task.metric, labels, len(weights), groups), counts, images.faults)


def _groups(task: Task, opened: ZeroShotTask, ids: Tensor) -> Tensor | None:  # -> (n,) int64
    """The group of each image: the first column of its metadata. None for tasks without groups."""
    if task.metric not in GROUPED:
        return None
    if opened.metadata is None:
        raise UserError(
            f"{opened.source.where(0)} has no npy member, but {task.metric} needs the {task.metadata[0]} of each "
            f"image; download the data again: neuclip data get {task.key}"
        )
    return torch.from_numpy(opened.metadata)[ids, 0]


def classification_metrics(
    task: Task, predictions: Predictions, labels: Tensor, classes: int, groups: Tensor | None = None
) -> Metrics:
    """acc1, acc5 (for five classes or more), mean_per_class_recall, and the task's own main metric. For a task with
    groups also the share of right answers in each group."""
    predicted, ranks = predictions
    metrics: Metrics = {
        "acc1": share(ranks == 1),
        "acc5": share(ranks <= 5) if classes >= 5 else None,
        "mean_per_class_recall": mean_per_class_recall(predicted, labels),
    }
    if task.metric == MACRO_F1:
        metrics[MACRO_F1] = macro_f1(predicted, labels)
    if groups is not None and task.metric in GROUPED:
        right = ranks <= (5 if task.metric == TOP_FIVE_GROUPS else 1)
        metrics[task.metric] = worst_group(right, groups)
        if task.metric == WORST_REGION:
            metrics[WITHOUT_OTHER] = worst_group(right, groups, without=OTHER_REGION)
        metrics |= {f"{task.metadata[0]}:{group}": value for group, value in group_shares(right, groups).items()}
    return metrics


def chance_of(metric: str, labels: Tensor, classes: int, groups: Tensor | None = None) -> float | None:
    """The chance level: the score of guesses that name each class as often as it occurs; for five guesses per image, of
    guesses that name all classes equally often. For accuracies and recalls these are DataComp's published chance
    levels, which do not consider groups."""
    if metric in (MACRO_F1, "mean_per_class_recall"):
        return 1 / len(labels.unique())
    if metric == TOP_FIVE_GROUPS:
        return min(1.0, 5 / classes)
    right = guess_shares(labels)
    return share(right) if groups is None else worst_group(right, groups)


def _retrieve(embedder: Embedder, source: Source, what: str) -> TaskScore:
    pairs = embedder.embed_pairs(source, what)
    figures = recall(pairs)
    metrics: Metrics = {
        f"{retrieved}_recall@{k}": figures[f"{direction}_recall_at_{k}"]
        for retrieved, direction in DIRECTIONS.items()
        for k in (1, 5, 10)
    }
    both = mean(figures[f"{direction}_recall_at_1"] for direction in DIRECTIONS.values())
    chance = mean(figures[f"{direction}_chance_at_1"] for direction in DIRECTIONS.values())
    counts = {"images": int(figures["images"]), "captions": int(figures["captions"])}
    return TaskScore(metrics | {"mean_recall@1": both, "main_metric": both}, chance, counts, pairs.faults)


def _solve(embedder: Embedder, opened: Puzzles, task: Task, what: str) -> TaskScore:
    """Solve puzzles: which of the candidate images are associated with a cue? The model chooses as many images as are
    right. A puzzle with an image that cannot be read is skipped."""
    images = embedder.embed_images(opened.source, what)
    embedder.check_bad_share(opened.source, images.faults)
    row = {id: number for number, id in enumerate(images.ids.tolist())}
    complete = [puzzle for puzzle in opened.puzzles if all(id in row for id in puzzle.candidates)]
    cues = embedder.embed_texts([cue_prompt(puzzle.cue) for puzzle in complete], f"{what}, cues")
    scores: list[tuple[int, float]] = []  # number of candidates, Jaccard index
    guessed: list[tuple[int, float]] = []  # number of candidates, mean Jaccard index of guessing
    for puzzle, cue in zip(complete, cues, strict=True):
        right = [number for number, id in enumerate(puzzle.candidates) if id in puzzle.associations]
        features = images.features[[row[id] for id in puzzle.candidates]]
        scores.append((len(features), jaccard(best_candidates(features @ cue, len(right)), right)))
        guessed.append((len(features), guessed_jaccard(len(features), len(right))))
    metrics, chances = _means_by_size(scores), _means_by_size(guessed)
    metrics["main_metric"] = metrics[task.metric]
    return TaskScore(metrics, chances[task.metric], {"images": len(row), "puzzles": len(complete)}, images.faults)


def _means_by_size(scores: list[tuple[int, float]]) -> Metrics:
    """The mean score of all puzzles, and of the puzzles of each size."""
    means: Metrics = {"avg_jaccard_score": mean(score for _, score in scores)}
    for name, (fewest, most) in PUZZLE_SIZES.items():
        means[f"jaccard_score_{name}"] = mean(score for size, score in scores if fewest <= size <= most)
    return means


def cue_prompt(cue: str) -> str:
    """The cue with an article, which is chosen by the first letter as in DataComp. It is wrong before a silent h.

    >>> cue_prompt("Apple"), cue_prompt("moon"), cue_prompt("hour")
    ('An apple', 'A moon', 'A hour')
    """
    cue = cue.lower()
    return f"An {cue}" if cue.startswith(("a", "e", "i", "o", "u")) else f"A {cue}"


def best_candidates(scores: Tensor, count: int) -> list[int]:  # (n,) -> places of the `count` highest
    return torch.sort(scores, descending=True, stable=True).indices[:count].tolist()


def jaccard(chosen: Collection[int], right: Collection[int]) -> float:
    """The Jaccard index of two sets: |intersection| / |union|.

    >>> jaccard([1, 2], [2, 3])
    0.3333333333333333
    """
    return len({*chosen} & {*right}) / len({*chosen} | {*right})


def guessed_jaccard(candidates: int, right: int) -> float:
    """The mean of `jaccard` if as many candidates as are right are chosen at random.

    >>> guessed_jaccard(2, 1)
    0.5
    """
    ways = {hits: math.comb(right, hits) * math.comb(candidates - right, right - hits) for hits in range(right + 1)}
    return sum(hits / (2 * right - hits) * number for hits, number in ways.items()) / math.comb(candidates, right)


def mean(values: Iterable[float]) -> float | None:
    """The mean; None for no values."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
