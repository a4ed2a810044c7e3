"""Zero-shot classification: builds a classifier from class names and templates, classifies images, computes metrics.

The metrics are pure functions of predictions, labels and groups. All of them break ties by the lowest label. (Libraries
that use topk for the top five and argmax for the largest may break the same tie in two ways.)
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
    """For each of n images the class with the highest score, and the rank of the right class, from 1."""

    predicted: Tensor  # (n,) int64
    ranks: Tensor  # (n,) int64


def classify(embedder: Embedder, task: ZeroShotTask) -> tuple[dict[str, float], tuple[Fault, ...]]:
    """Collective. Returns the figures of `accuracy` (on the main rank; {} on others) and the faults of the images that
    were skipped because they could not be read.

    Raises TooManyBadSamples if the share of skipped images is above the embedder's `max_bad_share`, or 1.
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
    """Every class name in every template, class by class."""
    return [template.replace(PLACEHOLDER, name) for name in classnames for template in templates]


def predict(
    image_features: Tensor, classifier: Tensor, labels: Tensor
) -> Predictions:  # (n, d), (classes, d), (n,) -> (n,) x 2
    """The predicted class and the rank of the right class for each image. A label without a row in the classifier is
    never right: its rank is classes + 1.

    >>> predict(torch.eye(2), torch.eye(2), torch.tensor([0, 0])).ranks
    tensor([1, 2])
    """
    has_row = (labels < len(classifier)).nonzero()[:, 0]
    ranks = best_ranks(image_features, classifier, has_row, labels[has_row])
    # argmax returns the first of equal scores.
    predicted = [scores.argmax(dim=1) for _, scores in score_blocks(image_features, classifier)]
    return Predictions(torch.cat(predicted), ranks)


def accuracy(
    image_features: Tensor, classifier: Tensor, labels: Tensor
) -> dict[str, float]:  # (n, d), (classes, d), (n,)
    """Zero-shot accuracies and their baselines. `mean_per_class` is over the classes that have images; `top5` is
    computed for more than five classes. `largest_class` is the accuracy of always naming the most frequent class; if
    classes differ in size, it is far above `chance`."""
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
    """The share of right answers: acc1 for `ranks == 1`, acc5 for `ranks <= 5`."""
    return right.double().mean().item()


def mean_per_class_recall(predicted: Tensor, labels: Tensor) -> float:  # (n,), (n,)
    """The unweighted mean of the recall of each class that has images."""
    return _mean_over_classes(predicted, labels, lambda true, predictions, images: true / images)


def macro_f1(predicted: Tensor, labels: Tensor) -> float:  # (n,), (n,)
    """The unweighted mean of F1 = 2 TP / (2 TP + FP + FN) of each class that has images."""
    return _mean_over_classes(predicted, labels, lambda true, predictions, images: 2 * true / (predictions + images))


def _mean_over_classes(predicted: Tensor, labels: Tensor, score: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    """The mean of a score over the classes that have images. `score` receives three counts for each of these classes:
    right predictions, all predictions of the class, and its images."""
    classes = int(max(predicted.max(), labels.max())) + 1
    images = torch.bincount(labels, minlength=classes).double()
    predictions = torch.bincount(predicted, minlength=classes).double()
    true = torch.bincount(labels[predicted == labels], minlength=classes).double()
    present = images > 0
    return score(true[present], predictions[present], images[present]).mean().item()


def group_shares(right: Tensor, groups: Tensor) -> dict[int, float]:  # (n,) bool, (n,) int64
    """The share of right answers in each group that has images, by the group's number."""
    return {group: share(right[groups == group]) for group in groups.unique().tolist()}


def worst_group(right: Tensor, groups: Tensor, *, without: int | None = None) -> float | None:  # (n,) bool, (n,)
    """The lowest share of right answers in a group other than `without`; None if there is no such group."""
    return min((value for group, value in group_shares(right, groups).items() if group != without), default=None)


def guess_shares(labels: Tensor) -> Tensor:  # (n,) -> (n,) float64
    """For each image the probability that a random guess is right, if each class is guessed as often as it occurs. The
    mean is the acc1 of guessing. The mean_per_class_recall and macro F1 of such guesses are 1 / classes with images.

    >>> guess_shares(torch.tensor([0, 0, 0, 1]))
    tensor([0.7500, 0.7500, 0.7500, 0.2500], dtype=torch.float64)
    """
    return (torch.bincount(labels).double() / len(labels))[labels]
