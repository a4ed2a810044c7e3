"""Zero-shot classification: class names in templates make a classifier, which scores the images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip.data.sample import Fault
from neuclip.data.zero_shot import PLACEHOLDER, ZeroShotTask
from neuclip.distributed.error_sync import on_main_rank
from neuclip.evaluation.embedding import Embedder, check_finite
from neuclip.evaluation.retrieval import best_ranks


def evaluate_task(embedder: Embedder, task: ZeroShotTask) -> tuple[dict[str, float], tuple[Fault, ...]]:
    """Collective. The figures of `accuracy`, on the main rank, and the images that could not be read and are left out.

    Raises TooManyBad when these are a larger share of all than the embedder's `max_bad_share`, or all.
    """
    weights = classifier(embedder, task.classnames, task.templates)
    images = embedder.embed_images(task.source, f"evaluating on {task.name}")
    embedder.refuse_bad_set(task.source, images.faults)
    labels = torch.tensor(task.labels)[images.ids]
    return on_main_rank(lambda: accuracy(images.features, weights, labels)) or {}, images.faults


def classifier(embedder: Embedder, classnames: list[str], templates: list[str]) -> Tensor:  # -> (classes, d)
    """One unit row per class: the mean over templates of the unit text features, normalized again."""
    prompts = [template.replace(PLACEHOLDER, name) for name in classnames for template in templates]
    features = embedder.embed_texts(prompts, "embedding class names")
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
