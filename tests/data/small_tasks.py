"""Evaluation sets in their local layouts, small enough to make in a moment."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.data.small_shards import Member, image_bytes, write_tar

CLASSNAMES = ("cat", "dog", "bird", "", "fish", "horse")
TEMPLATES = ("a photo of a {c}", "{c}")


def npy(*numbers: int) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array(numbers))
    return stream.getvalue()


def metadata(number: int) -> tuple[int, ...]:
    return number % 3, 2000 + number, number % 5, 1


def sample(number: int, *, with_metadata: bool = False) -> list[Member]:
    key = f"s{number:07d}"
    members = [(f"{key}.cls", str(number % 6).encode()), (f"{key}.png", image_bytes(number))]
    return [*members, *([(f"{key}.npy", npy(*metadata(number)))] if with_metadata else [])]


def write_task(
    folder: Path,
    *,
    sizes: Sequence[int] = (17, 17),
    classnames: Sequence[str] = CLASSNAMES,
    templates: Sequence[str] | None = TEMPLATES,
    with_metadata: bool = False,
) -> Path:
    """A classification webdataset of so many samples per shard; sample k has the label k % 6."""
    first = 0
    for shard, size in enumerate(sizes):
        numbers = range(first, first + size)
        members = [member for number in numbers for member in sample(number, with_metadata=with_metadata)]
        write_tar(folder / "test" / f"{shard}.tar", members)
        first += size
    (folder / "test" / "nshards.txt").write_text(f"{len(sizes)}\n")
    (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in classnames))
    if templates is not None:
        (folder / "zeroshot_classification_templates.txt").write_text("".join(f"{line}\n" for line in templates))
    return folder


def write_class_folders(folder: Path, **counts: int) -> Path:
    """counts: how many images of each class."""
    number = 0
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for _ in range(count):
            (folder / name / f"{number:03d}.png").write_bytes(image_bytes(number))
            number += 1
    return folder
