"""Building a labelled set: read the package, leave malformed rows out, write a zero-shot folder and its notes."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from neuclip.datasets.fetching import fetched
from neuclip.datasets.labelled import reading
from neuclip.datasets.labelled.reading import Pixels, Reading
from neuclip.datasets.labelled.spec import PART, LabelledFacts
from neuclip.datasets.png import encode_png
from neuclip.datasets.zero_shot_writing import write_zero_shot_folder
from neuclip.errors import RunFailed
from neuclip.progress import StatusLine, track
from neuclip.records import write_json

READERS: dict[str, Callable[[Path], Reading]] = {
    "cifar-10": reading.read_cifar,
    "mnist": reading.read_mnist,
    "fashion-mnist": reading.read_fashion,
    "quickdraw": reading.read_quickdraw,
    "digits": reading.read_digits,
}


def build_labelled(facts: LabelledFacts, folder: Path) -> None:
    """Build the set into `folder`, from the start: writing takes seconds, and what was fetched is kept."""
    shutil.rmtree(folder, ignore_errors=True)
    source = fetched(facts.package)
    dropped: Counter[str] = Counter()
    try:
        read = READERS[facts.name](source)
        rows = list(track(_valid(read, dropped), f"reading {facts.name}", facts.rows, "images"))
        if not rows:
            raise ValueError("no images")
    except (OSError, ValueError, KeyError) as error:
        file = facts.package.file_pattern
        raise RunFailed(
            f"{facts.name}: {file} does not hold what the tested version does ({error}); "
            f"delete {source} and the file if you put it there yourself, and try again"
        ) from error
    if facts.per_class:
        rows = first_of_each_class(rows, facts.per_class)
    images = (
        (encode_png(pixels), label) for label, pixels in track(rows, f"writing {facts.name}", len(rows), "images")
    )
    write_zero_shot_folder(folder / PART, images, read.class_names, [facts.template])
    if len(rows) != facts.expected:
        StatusLine().say(f"warning: {facts.name} has {len(rows):,} images instead of {facts.expected:,}")
    write_notes(facts, folder, read, [label for label, _ in rows], dropped)


def _valid(read: Reading, dropped: Counter[str]) -> Iterator[tuple[int, Pixels]]:
    """The rows that are an image with a label; the others are counted by reason."""
    for label, pixels in read.rows:
        if pixels is None:
            dropped["not an image"] += 1
        elif label not in range(len(read.class_names)):
            dropped["no such label"] += 1
        else:
            yield label, pixels


def first_of_each_class(rows: list[tuple[int, Pixels]], per_class: int) -> list[tuple[int, Pixels]]:
    """Of each class the images with the smallest hashes, equal ones once, in the order of the hashes.

    Which image is chosen depends on its pixels alone, so that neither order nor duplicates in the file matter.
    """
    hashed = sorted({hashlib.sha256(pixels.tobytes()).digest(): (label, pixels) for label, pixels in rows}.items())
    taken: Counter[int] = Counter()
    chosen = []
    for _, (label, pixels) in hashed:
        if taken[label] < per_class:
            taken[label] += 1
            chosen.append((label, pixels))
    return chosen


def write_notes(facts: LabelledFacts, folder: Path, read: Reading, labels: list[int], dropped: Counter[str]) -> None:
    """README.md for people, BUILD.json for those who want to know whether two builds are the same."""
    counts = Counter(labels)
    fewest, most = min(counts.values()), max(counts.values())
    per_class = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    shard = folder / PART / "test" / "0.tar"
    package = f"{facts.package.registry} {facts.package.name} {facts.package.version}"
    left_out = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(dropped.items())) or "none"
    (folder / "README.md").write_text(
        f"# {facts.name}\n\n{len(labels):,} test images in {len(read.class_names)} classes "
        f"({per_class} per class), from the package {package}.\n\n"
        f"{facts.origin}\n\nRows of the package that were left out: {left_out}.\n\n"
        f"`{PART}/` has the layout of CLIP_benchmark's webdataset classification sets; its one template is "
        f"`{facts.template}`.\nUse it with `--evaluation.zero_shot {facts.name}`.\n",
        encoding="utf-8",
    )
    write_json(
        folder / "BUILD.json",
        {
            "packages": {facts.package.name: facts.package.version},
            "images": len(labels),
            "classes": {name: counts[label] for label, name in enumerate(read.class_names)},
            "left_out": dict(sorted(dropped.items())),
            "shard_sha256": hashlib.sha256(shard.read_bytes()).hexdigest(),
        },
    )
