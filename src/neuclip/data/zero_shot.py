"""Zero-shot classification sets: images with labels, the names of the classes, and templates for prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from neuclip.data import by_name
from neuclip.data.open import open_source
from neuclip.data.source import Source
from neuclip.errors import UserError

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
        """A data set by name or a folder."""
        folder = Path(by_name.resolve(str(address)) or address)
        classnames, templates = _lines(folder / CLASSNAMES), _lines(folder / TEMPLATES)
        for number, template in enumerate(templates, 1):
            if PLACEHOLDER not in template:
                raise UserError(
                    f"{folder / TEMPLATES} line {number}: no {PLACEHOLDER} in {template!r}; "
                    f"write {PLACEHOLDER} where the class name goes"
                )
        _check_shards(folder / "test")
        source = open_source(str(folder / "test"))
        return cls(str(address), classnames, templates, source, _labels(source, folder, len(classnames)))


def _lines(path: Path) -> list[str]:
    """Stripped lines. Blank ones stay: a class may have an empty name, and dropping it would shift all labels."""
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; a zero-shot folder has {CLASSNAMES}, {TEMPLATES} and test/*.tar with .cls labels"
        )
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    if not lines:
        raise UserError(f"{path}: the file is empty; write one entry per line")
    return lines


def _check_shards(folder: Path) -> None:
    """Where the folder says how many shards it has, a missing one must not become a score."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; a zero-shot folder keeps its images in test/0.tar, test/1.tar ...")
    stated = folder / SHARD_COUNT
    if not stated.is_file():
        return
    text = stated.read_text(encoding="utf-8").strip()
    if not text.isdecimal():
        raise UserError(f"{stated}: {text!r} is not a number of shards; write how many tar files there are")
    for number in range(int(text)):
        if not (folder / f"{number}.tar").is_file():
            raise UserError(f"{folder / f'{number}.tar'}: missing, though {stated} says {text} shards; copy it again")


def _labels(source: Source, folder: Path, classes: int) -> list[int]:
    labels = source.labels()
    if labels is None:
        raise UserError(f"{folder / 'test'}: not every sample has a label; each image needs a .cls member")
    for id, label in enumerate(labels):
        if not 0 <= label < classes:
            raise UserError(
                f"{source.where(id)}: label {label}, but {folder / CLASSNAMES} has {classes} lines "
                f"(labels 0 to {classes - 1}); correct one of them"
            )
    return labels
