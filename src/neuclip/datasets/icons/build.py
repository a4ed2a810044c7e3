"""Building icons-30k: draw every source, drop equal images and near duplicates, write everything."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from neuclip.datasets.drawn import DrawnCollection, draw_collections
from neuclip.datasets.icons.listing import list_drawings
from neuclip.datasets.icons.sources import Source, missing_packages, present_sources
from neuclip.datasets.icons.writing import IconPair, write_icons, write_notes, write_zero_shot
from neuclip.datasets.rasteriser import RASTERISER
from neuclip.datasets.splitting import (
    NEW_CONCEPTS,
    NEW_DRAWINGS,
    TRAIN,
    different_images,
    drop_near_duplicates,
    group_by_part,
    heldout_concepts,
    split_by_concept,
    widely_drawn,
)
from neuclip.datasets.writing import Images
from neuclip.errors import UserError
from neuclip.progress import StatusLine

EXPECTED_PAIRS = {TRAIN: 27424, NEW_DRAWINGS: 1144, NEW_CONCEPTS: 1542}  # of the tested package versions


def build(folder: Path, *, processes: int | None = None) -> None:
    """Build the whole set into `folder`, with progress on stderr: a minute on two free cores and 0.2 GB of memory."""
    status = StatusLine()
    sources = usable_sources(status)
    drawn = draw_collections(sources, list_drawings, folder / "drawn", processes)
    parts, names = split_all(drawn)
    images = Images(drawn)
    for part, pairs in parts.items():
        write_icons(folder / part, pairs, images, hide=heldout_concepts() if part == TRAIN else frozenset())
    write_zero_shot(folder / "zero-shot", parts, names, images)
    write_notes(folder, sources, parts)
    warn_of_other_counts(drawn, {part: len(pairs) for part, pairs in parts.items()}, status)
    shutil.rmtree(folder / "drawn")


def usable_sources(status: StatusLine) -> list[Source]:
    """The installed sources. Warns of missing ones; an error when nothing can be drawn."""
    missing = missing_packages()
    sources = present_sources()
    if RASTERISER in missing or not sources:
        raise UserError(
            f"icons-30k needs the demo packages (missing: {', '.join(missing)}): pip install 'neuclip[demo]'"
        )
    if missing:
        status.say(
            f"warning: icons-30k is built without {', '.join(missing)}; pip install 'neuclip[demo]' has them all"
        )
    return sources


def split_all(drawn: Sequence[DrawnCollection[Source]]) -> tuple[dict[str, list[IconPair]], list[str]]:
    """The pairs of every part, and the captions that three families or more draw (a zero-shot task)."""
    pairs = different_images(drawn)
    concepts = [pair.concept for pair in pairs]
    parts = split_by_concept(concepts, heldout_concepts())
    seen = [concept for concept, part in zip(concepts, parts, strict=True) if part != NEW_CONCEPTS]
    return group_by_part(pairs, drop_near_duplicates(pairs, parts, drawn)), sorted(widely_drawn(seen))


def warn_of_other_counts(drawn: Sequence[DrawnCollection[Source]], parts: dict[str, int], status: StatusLine) -> None:
    """Other counts than those of the tested package versions are no error, but results cannot be compared."""
    for one in drawn:
        source, count = one.collection, len(one.names)
        if count != source.expected:
            status.say(
                f"warning: {source.name} gave {count:,} images instead of {source.expected:,}; "
                f"another version of {source.package} than the tested one?"
            )
    for part, expected in EXPECTED_PAIRS.items():
        if parts[part] != expected and not missing_packages():
            status.say(f"warning: {part} has {parts[part]:,} pairs instead of {expected:,}")
