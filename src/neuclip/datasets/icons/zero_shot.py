"""Zero-shot tasks on the test images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from neuclip.datasets.zero_shot_writing import write_zero_shot_folder

TEMPLATES = (
    "{c}",
    "an image of {c}.",
    "an icon of {c}.",
    "a drawing of {c}.",
    "a small image of {c}.",
)
LEAST_PICTURES = 5  # a subgroup with fewer test images has no accuracy worth reporting
TASKS = ("groups", "subgroups", "names")


class Labelled(NamedTuple):
    png: bytes
    class_name: str


def group_words(group: str) -> str:
    """
    >>> group_words("animals-nature")
    'animals and nature'
    """
    return group.replace("-", " and ")


def subgroup_words(subgroup: str) -> str:
    """
    >>> subgroup_words("transport-ground")
    'transport ground'
    """
    return subgroup.replace("-", " ")


def frequent_classes(samples: Sequence[Labelled], least: int = LEAST_PICTURES) -> list[Labelled]:
    """The samples whose class has enough images."""
    counts = Counter(sample.class_name for sample in samples)
    return [sample for sample in samples if counts[sample.class_name] >= least]


def write_task(folder: Path, samples: Sequence[Labelled], class_names: Sequence[str] | None = None) -> None:
    """Write one task; without `class_names` the classes are those that occur, in alphabetical order."""
    names = sorted(class_names or {sample.class_name for sample in samples})
    label = {name: number for number, name in enumerate(names)}
    write_zero_shot_folder(folder, ((sample.png, label[sample.class_name]) for sample in samples), names, TEMPLATES)
