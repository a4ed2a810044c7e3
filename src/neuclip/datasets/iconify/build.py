"""Building iconify: read the collections, draw them, drop equal images and near twins, write everything."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from neuclip.data.machine import available_cores
from neuclip.datasets.fetching import Package
from neuclip.datasets.iconify.collections import read_collections
from neuclip.datasets.iconify.drawing import Counts, Drawings, draw_collections
from neuclip.datasets.iconify.notes import write_notes
from neuclip.datasets.iconify.splitting import Pair, different_images, drop_twins_of_train, split_by_names
from neuclip.datasets.iconify.writing import write_part
from neuclip.datasets.icons.rasteriser import require_rasteriser
from neuclip.datasets.icons.split import NEW_CONCEPTS, SPLITS, heldout_concepts
from neuclip.progress import StatusLine

MOST_PROCESSES = 8


def build_set(folder: Path, package: Package, content: Path, *, processes: int = 0) -> None:
    """Build from the unpacked package `content` into `folder`; called again after a kill, it goes on there.

    Nine minutes on two free cores and 0.8 GB of memory for the whole package. `processes` 0: one per core.
    """
    require_rasteriser("iconify")
    drawn = folder / "drawn"
    if not (folder / "BUILD.json").exists():  # else only the sweeping was cut off
        processes = processes or min(MOST_PROCESSES, available_cores())
        drawings = draw_collections(read_collections(content), drawn, processes)
        parts, dropped = split_all(drawings)
        for part, pairs in parts.items():
            hide = frozenset() if part == NEW_CONCEPTS else heldout_concepts()
            write_part(folder / part, pairs, drawings, hide=hide)
        write_notes(folder, package, parts, total_counts(drawings), dropped)
    shutil.rmtree(drawn, ignore_errors=True)


def split_all(drawings: Sequence[Drawings]) -> tuple[dict[str, list[Pair]], Mapping[str, int]]:
    """The pairs of every part, and how many drawn icons are in none, by reason."""
    status = StatusLine()
    status.show("looking for equal images")
    pairs = different_images(drawings)
    status.show(f"splitting {len(pairs):,} different images")
    before_twins = split_by_names(pairs, heldout_concepts())
    status.close()
    after_twins = drop_twins_of_train(pairs, before_twins, drawings)
    parts: dict[str, list[Pair]] = {part: [] for part in SPLITS}
    for pair, part in zip(pairs, after_twins, strict=True):
        if part:
            parts[part].append(pair)
    in_no_part = before_twins.count(None)
    return parts, {
        "equal to another image": total_counts(drawings).drawn - len(pairs),
        "other sizes and styles of tested drawings": in_no_part,
        "test images with a near twin in train": after_twins.count(None) - in_no_part,
    }


def total_counts(drawings: Sequence[Drawings]) -> Counts:
    total = Counts()
    for of_one in drawings:
        total = total.plus(of_one.counts)
    return total
