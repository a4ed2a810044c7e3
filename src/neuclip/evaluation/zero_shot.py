"""Zero-shot classification: class names in sentences make a classifier, images are scored by it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuclip.data.sample import Fault
from neuclip.data.zero_shot_task import PLACEHOLDER, ZeroShotTask
from neuclip.evaluation.embedding import Tokenize, Transform, check_finite, embed_images, embed_texts
from neuclip.evaluation.retrieval import best_ranks
from neuclip.evaluation.unusable import refuse_above


def evaluate_task(
    towers: nn.Module,
    task: ZeroShotTask,
    *,
    transform: Transform,
    tokenize: Tokenize,
    batch_size: int,
    workers: int,
    max_bad_share: float = 1.0,
) -> tuple[dict[str, float], tuple[Fault, ...]]:
    """The figures of `accuracy`, and the images that could not be read and are left out.

    Raises TooManyBad when these are a larger share of all than `max_bad_share`, or all.
    """
    weights = classifier(towers, tokenize, task.classnames, task.templates, batch_size=batch_size)
    images = embed_images(
        towers,
        task.source,
        transform=transform,
        tokenize=tokenize,
        batch_size=batch_size,
        workers=workers,
        what=f"evaluating on {task.name}",
    )
    refuse_above(max_bad_share, task.source, images.faults)
    labels = torch.tensor(task.labels)[images.ids]
    return accuracy(images.features, weights, labels), images.faults


def classifier(
    towers: nn.Module, tokenize: Tokenize, classnames: list[str], templates: list[str], *, batch_size: int = 256
) -> Tensor:  # -> (classes, d)
    """One unit row per class: the mean over templates of the unit text features, normalised again."""
    prompts = [template.replace(PLACEHOLDER, name) for name in classnames for template in templates]
    features = embed_texts(towers, prompts, tokenize=tokenize, batch_size=batch_size, what="embedding class names")
    return F.normalize(features.view(len(classnames), len(templates), -1).mean(dim=1), dim=1)


def accuracy(
    image_features: Tensor, classifier: Tensor, labels: Tensor
) -> dict[str, float]:  # (n, d), (classes, d), (n,)
    """Shares of right answers; ties go to the lowest label. `mean_per_class` is over the classes that have images;
    `top5` is there with more than five classes. `largest_class` is what always naming the commonest class would reach:
    where classes differ in size it is far above `chance`."""
    check_finite(image_features, "image features")
    images, classes = len(labels), len(classifier)
    ranks = best_ranks(image_features, classifier, torch.arange(images, device=labels.device), labels)
    right = (ranks == 1).double()
    counts = torch.bincount(labels, minlength=classes)
    right_by_class = torch.bincount(labels, weights=right, minlength=classes)
    present = counts > 0
    figures: dict[str, float] = {
        "top1": right.mean().item(),
        "mean_per_class": (right_by_class[present] / counts[present]).mean().item(),
        "chance": 1 / classes,
        "largest_class": counts.max().item() / images,
        "images": images,
        "classes": classes,
    }
    if classes > 5:
        figures["top5"] = (ranks <= 5).double().mean().item()
    return figures
