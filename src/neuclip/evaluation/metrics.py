"""DataComp's metrics as pure functions of predictions, labels and groups. Ties go to the lowest index, everywhere.

Where two classes have the same name their scores are equal, and libraries that take "the first of the top five" and
"the largest" then disagree with themselves; with one rule for all metrics they agree.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 4096  # images whose scores are in memory at a time


class Predictions(NamedTuple):
    """Of n images: the class with the highest score, and the place of the right class among all, from 1."""

    predicted: Tensor  # (n,) int64
    ranks: Tensor  # (n,) int64


def predict(
    image_features: Tensor, classifier: Tensor, labels: Tensor
) -> Predictions:  # (n, d), (classes, d), (n,) -> (n,) x 2
    """A label for which the classifier has no row is never right: its rank is classes + 1.

    >>> predict(torch.eye(2), torch.eye(2), torch.tensor([0, 0])).ranks
    tensor([1, 2])
    """
    # Equal rows are scored once: the same product at another place of a matrix may differ in its last bit.
    rows, column = classifier.unique(dim=0, return_inverse=True)
    classes = len(classifier)
    place = torch.arange(classes)
    predicted, ranks = [], []
    for features, own in zip(image_features.split(CHUNK), labels.split(CHUNK), strict=True):
        scores = (features @ rows.T)[:, column]  # (b, classes)
        best = scores.amax(dim=1, keepdim=True)
        predicted.append(torch.where(scores == best, place, classes).amin(dim=1))
        right = scores.gather(1, own.clamp(max=classes - 1)[:, None])
        before = (scores > right) | ((scores == right) & (place < own[:, None]))
        ranks.append(torch.where(own < classes, 1 + before.sum(dim=1), classes + 1))
    return Predictions(torch.cat(predicted), torch.cat(ranks))


def share(right: Tensor) -> float:  # (n,) bool
    """acc1 of `ranks == 1`, acc5 of `ranks <= 5`."""
    return right.double().mean().item()


def mean_per_class_recall(predicted: Tensor, labels: Tensor) -> float:  # (n,), (n,)
    """The recall of each class that has images, and their unweighted mean."""
    return _mean_over_classes(predicted, labels, lambda true, named, there: true / there)


def macro_f1(predicted: Tensor, labels: Tensor) -> float:  # (n,), (n,)
    """F1 = 2 TP / (2 TP + FP + FN) of each class that has images, and their unweighted mean."""
    return _mean_over_classes(predicted, labels, lambda true, named, there: 2 * true / (named + there))


def _mean_over_classes(predicted: Tensor, labels: Tensor, score) -> float:
    """`score` gets, for every class that has images: right answers, times it was named, images it has."""
    classes = int(max(predicted.max(), labels.max())) + 1
    there = torch.bincount(labels, minlength=classes).double()
    named = torch.bincount(predicted, minlength=classes).double()
    true = torch.bincount(labels[predicted == labels], minlength=classes).double()
    present = there > 0
    return score(true[present], named[present], there[present]).mean().item()


def group_shares(right: Tensor, groups: Tensor) -> dict[int, float]:  # (n,) bool, (n,) int64
    """The share of right answers in every group that has images, by the group's number."""
    return {group: share(right[groups == group]) for group in groups.unique().tolist()}


def worst_group(right: Tensor, groups: Tensor, *, without: int | None = None) -> float | None:  # (n,) bool, (n,)
    """The lowest share of right answers of a group; None if there is no group, or none but the one left out."""
    return min((value for group, value in group_shares(right, groups).items() if group != without), default=None)


def jaccard(chosen: Collection[int], right: Collection[int]) -> float:
    """|common| / |together| of two sets.

    >>> jaccard([1, 2], [2, 3])
    0.3333333333333333
    """
    return len({*chosen} & {*right}) / len({*chosen} | {*right})


def guess_shares(labels: Tensor) -> Tensor:  # (n,) -> (n,) float64
    """Of each image, the probability that a guess is right which names every class as often as it occurs. Its mean is
    the acc1 of guessing; mean_per_class_recall and macro F1 of such guesses are 1 / classes that have images.

    >>> guess_shares(torch.tensor([0, 0, 0, 1]))
    tensor([0.7500, 0.7500, 0.7500, 0.2500], dtype=torch.float64)
    """
    return (torch.bincount(labels).double() / len(labels))[labels]


def guessed_jaccard(candidates: int, right: int) -> float:
    """What `jaccard` is on average when as many candidates as are right are chosen at random.

    >>> guessed_jaccard(2, 1)
    0.5
    """
    ways = {hits: math.comb(right, hits) * math.comb(candidates - right, right - hits) for hits in range(right + 1)}
    return sum(hits / (2 * right - hits) * number for hits, number in ways.items()) / math.comb(candidates, right)


def best_candidates(scores: Tensor, count: int) -> list[int]:  # (n,) -> places of the `count` highest
    return torch.sort(scores, descending=True, stable=True).indices[:count].tolist()


def mean(values: Iterable[float]) -> float | None:
    """None where there is nothing to average."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
