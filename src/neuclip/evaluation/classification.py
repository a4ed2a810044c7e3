"""Zero-shot classification: class names in templates make a classifier, which scores the images; and its metrics.

The metrics are pure functions of predictions, labels and groups. Ties go to the lowest label everywhere: libraries that
take "the first of the top five" and "the largest" of equal scores disagree with themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip.data.source import Fault
from neuclip.data.task_sets import PLACEHOLDER, ZeroShotTask
from neuclip.distributed.ranks import on_main_rank
from neuclip.evaluation.embedding import Embedder, check_finite
from neuclip.evaluation.retrieval import best_ranks, score_blocks


class Predictions(NamedTuple):
    """Of n images: the class with the highest score, and the place of the right class among all, from 1."""

    predicted: Tensor  # (n,) int64
    ranks: Tensor  # (n,) int64


def classify(embedder: Embedder, task: ZeroShotTask) -> tuple[dict[str, float], tuple[Fault, ...]]:
    """Collective. The figures of `accuracy`, on the main rank, and the images that could not be read and are left out.

    Raises TooManyBadSamples when these are a larger share of all than the embedder's `max_bad_share`, or all.
    """
    weights = classifier(embedder, task.classnames, task.templates)
    images = embedder.embed_images(task.source, f"evaluating on {task.name}")
    embedder.check_bad_share(task.source, images.faults)
    labels = torch.tensor(task.labels)[images.ids]
    return on_main_rank(lambda: accuracy(images.features, weights, labels)) or {}, images.faults


def classifier(embedder: Embedder, classnames: list[str], templates: list[str]) -> Tensor:  # -> (classes, d)
    """One unit row per class: the mean over templates of the unit text features, normalized again."""
    features = embedder.embed_texts(prompts(classnames, templates), "embedding class names")
    return F.normalize(features.view(len(classnames), len(templates), -1).mean(dim=1), dim=1)


def prompts(classnames: list[str], templates: list[str]) -> list[str]:
    """Class by class, each name in every template."""
    return [template.replace(PLACEHOLDER, name) for name in classnames for template in templates]


def predict(
    image_features: Tensor, classifier: Tensor, labels: Tensor
) -> Predictions:  # (n, d), (classes, d), (n,) -> (n,) x 2
    """A label for which the classifier has no row is never right: its rank is classes + 1.

    >>> predict(torch.eye(2), torch.eye(2), torch.tensor([0, 0])).ranks
    tensor([1, 2])
    """
    has_row = (labels < len(classifier)).nonzero()[:, 0]
    ranks = best_ranks(image_features, classifier, has_row, labels[has_row])
    # argmax promises the first of equal ones.
    predicted = [scores.argmax(dim=1) for _, scores in score_blocks(image_features, classifier)]
    return Predictions(torch.cat(predicted), ranks)


def accuracy(
    image_features: Tensor, classifier: Tensor, labels: Tensor
) -> dict[str, float]:  # (n, d), (classes, d), (n,)
    """Shares of right answers. `mean_per_class` is over the classes that have images; `top5` is there with more than
    five classes. `largest_class` is what always naming the commonest class would reach: where classes differ in size it
    is far above `chance`."""
    check_finite(image_features, "image features")
    classes = len(classifier)
    predicted, ranks = predict(image_features, classifier, labels)
    figures: dict[str, float] = {
        "top1": share(ranks == 1),
        "mean_per_class": mean_per_class_recall(predicted, labels),
        "chance": 1 / classes,
        "largest_class": labels.bincount().max().item() / len(labels),
        "images": len(labels),
        "classes": classes,
    }
    if classes > 5:
        figures["top5"] = share(ranks <= 5)
    return figures


def share(right: Tensor) -> float:  # (n,) bool
    """acc1 of `ranks == 1`, acc5 of `ranks <= 5`."""
    return right.double().mean().item()


def mean_per_class_recall(predicted: Tensor, labels: Tensor) -> float:  # (n,), (n,)
    """The recall of each class that has images, and their unweighted mean."""
    return _mean_over_classes(predicted, labels, lambda true, named, there: true / there)


def macro_f1(predicted: Tensor, labels: Tensor) -> float:  # (n,), (n,)
    """F1 = 2 TP / (2 TP + FP + FN) of each class that has images, and their unweighted mean."""
    return _mean_over_classes(predicted, labels, lambda true, named, there: 2 * true / (named + there))


def _mean_over_classes(predicted: Tensor, labels: Tensor, score: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
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


def guess_shares(labels: Tensor) -> Tensor:  # (n,) -> (n,) float64
    """Of each image, the probability that a guess is right which names every class as often as it occurs. Its mean is
    the acc1 of guessing; mean_per_class_recall and macro F1 of such guesses are 1 / classes that have images.

    >>> guess_shares(torch.tensor([0, 0, 0, 1]))
    tensor([0.7500, 0.7500, 0.7500, 0.2500], dtype=torch.float64)
    """
    return (torch.bincount(labels).double() / len(labels))[labels]
