"""Zero-shot classification: class names in sentences make a classifier, pictures are scored by it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuclip.data.named.builtin import resolve
from neuclip.data.source import Source, open_source
from neuclip.errors import AskedWrongly
from neuclip.evaluation.embedding import Tokenize, Transform, check_finite, embed_images, embed_texts
from neuclip.evaluation.retrieval import best_ranks

CLASSNAMES = "classnames.txt"
TEMPLATES = "zeroshot_classification_templates.txt"
SHARD_COUNT = "nshards.txt"
PLACEHOLDER = "{c}"


@dataclass(frozen=True)
class ZeroShotTask:
    """A folder in CLIP_benchmark's layout: classnames.txt (line = label), templates with {c}, test/*.tar with .cls.

    >>> task = ZeroShotTask.open("zeroshot/wds_cifar10")                                            # doctest: +SKIP
    """

    name: str
    classnames: list[str]
    templates: list[str]
    source: Source
    labels: list[int]  # of every id of the source

    @classmethod
    def open(cls, address: str | Path) -> ZeroShotTask:
        """A built-in name or a folder."""
        folder = Path(resolve(str(address)) or address)
        classnames, templates = _lines(folder / CLASSNAMES), _lines(folder / TEMPLATES)
        for number, template in enumerate(templates, 1):
            if PLACEHOLDER not in template:
                raise AskedWrongly(
                    f"{folder / TEMPLATES} line {number}: no {PLACEHOLDER} in {template!r}; "
                    f"write {PLACEHOLDER} where the class name goes"
                )
        _check_shards(folder / "test")
        source = open_source(str(folder / "test"))
        return cls(str(address), classnames, templates, source, _labels(source, folder, len(classnames)))


def evaluate_task(
    towers: nn.Module, task: ZeroShotTask, *, transform: Transform, tokenize: Tokenize, batch_size: int, workers: int
) -> dict[str, float]:
    """The figures of `accuracy`, and `skipped`: pictures that could not be read and are left out."""
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
    labels = torch.tensor(task.labels)[images.ids]
    return accuracy(images.features, weights, labels) | {"skipped": len(images.faults)}


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
    """Shares of right answers; ties go to the lowest label. `mean_per_class` is over the classes that have pictures;
    `top5` is there with more than five classes."""
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
        "images": images,
        "classes": classes,
    }
    if classes > 5:
        figures["top5"] = (ranks <= 5).double().mean().item()
    return figures


def _lines(path: Path) -> list[str]:
    """Stripped lines. Blank ones stay: a class may have an empty name, and dropping it would shift all labels."""
    if not path.is_file():
        raise AskedWrongly(
            f"{path}: no such file; a zero-shot folder has {CLASSNAMES}, {TEMPLATES} and test/*.tar with .cls labels"
        )
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    if not lines:
        raise AskedWrongly(f"{path}: the file is empty; write one entry per line")
    return lines


def _check_shards(folder: Path) -> None:
    """Where the folder says how many shards it has, a missing one must not become a score."""
    if not folder.is_dir():
        raise AskedWrongly(
            f"{folder}: no such folder; a zero-shot folder keeps its pictures in test/0.tar, test/1.tar ..."
        )
    stated = folder / SHARD_COUNT
    if not stated.is_file():
        return
    text = stated.read_text(encoding="utf-8").strip()
    if not text.isdecimal():
        raise AskedWrongly(f"{stated}: {text!r} is not a number of shards; write how many tar files there are")
    for number in range(int(text)):
        if not (folder / f"{number}.tar").is_file():
            raise AskedWrongly(
                f"{folder / f'{number}.tar'}: missing, though {stated} says {text} shards; copy it again"
            )


def _labels(source: Source, folder: Path, classes: int) -> list[int]:
    read = getattr(source, "labels", None)
    labels = read() if read is not None else None
    if labels is None:
        raise AskedWrongly(f"{folder / 'test'}: not every sample has a label; each picture needs a .cls member")
    for id, label in enumerate(labels):
        if not 0 <= label < classes:
            raise AskedWrongly(
                f"{source.where(id)}: label {label}, but {folder / CLASSNAMES} has {classes} lines "
                f"(labels 0 to {classes - 1}); correct one of them"
            )
    return labels
