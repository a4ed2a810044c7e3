"""Building icons-30k: list the drawings, draw them, drop equal images and near duplicates, write everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from neuclip.datasets.drawing import Drawn
from neuclip.datasets.emoji import read_emoji_table
from neuclip.datasets.icons.listing import Drawing, list_drawings
from neuclip.datasets.icons.sources import Source, missing_packages, present_sources
from neuclip.datasets.icons.writing import IconPair, write_icons, write_notes, write_zero_shot
from neuclip.datasets.near_duplicates import stack_thumbnails, unique_images
from neuclip.datasets.rasteriser import RASTERISER
from neuclip.datasets.splitting import (
    NEW_CONCEPTS,
    NEW_DRAWINGS,
    TRAIN,
    Concept,
    drop_near_duplicates,
    group_by_part,
    held_out_positions,
    heldout_concepts,
    split_by_concept,
    train_positions,
    widely_drawn,
)
from neuclip.datasets.workers import Drawers
from neuclip.errors import UserError
from neuclip.progress import StatusLine, track

EXPECTED_PAIRS = {TRAIN: 27424, NEW_DRAWINGS: 1144, NEW_CONCEPTS: 1542}  # of the tested package versions


def build(folder: Path, *, processes: int | None = None) -> None:
    """Build the whole set into `folder`, with progress on stderr: a minute on two free cores, under 1 GB of memory."""
    status = StatusLine()
    sources = usable_sources(status)
    status.show(f"listing the drawings of {len(sources)} sources")
    pairs = draw_pairs(list_all(sources), processes)
    warn_of_other_counts(sources, pairs, status)
    kept = unique_images([pair.drawn.digest for pair in pairs], [pair.caption for pair in pairs])
    pairs = [pairs[position] for position in kept]
    status.show(f"looking for near duplicates among {len(pairs):,} different images")
    parts, names = split_all(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for part, chosen in parts.items():
        write_icons(folder / part, chosen, hide=heldout_concepts() if part == TRAIN else frozenset())
    status.show("writing the zero-shot tasks")
    write_zero_shot(folder / "zero-shot", parts[NEW_DRAWINGS], parts[NEW_CONCEPTS], names)
    write_notes(folder, sources, parts)
    if not missing_packages():
        warn_of_other_parts(parts, status)
    status.close()


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


def list_all(sources: Sequence[Source]) -> list[Drawing]:
    emoji = read_emoji_table()
    return [drawing for source in sources for drawing in list_drawings(source, emoji)]


def draw_pairs(drawings: Sequence[Drawing], processes: int | None) -> list[IconPair]:
    """Every drawing that shows something, in the order of the list."""
    with Drawers(processes) as drawers:
        images = drawers.draw([drawing.image for drawing in drawings])
        shown = track(zip(drawings, images, strict=True), "drawing", len(drawings), "images")
        return [_pair(drawing, image) for drawing, image in shown if image]


def _pair(drawing: Drawing, image: Drawn) -> IconPair:
    source = drawing.source
    return IconPair(f"{source.name}/{drawing.key}", drawing.caption, source.family, drawing, image)


def split_all(pairs: Sequence[IconPair]) -> tuple[dict[str, list[IconPair]], list[str]]:
    """The pairs of every part, and the captions that three families or more draw (a zero-shot task)."""
    concepts = [Concept(pair.caption, pair.family) for pair in pairs]
    parts = split_by_concept(concepts, heldout_concepts())
    thumbnails = stack_thumbnails([pair.drawn.thumbnail for pair in pairs])
    tested, train = thumbnails.rows(held_out_positions(parts)), thumbnails.rows(train_positions(parts))
    groups = group_by_part(pairs, drop_near_duplicates(parts, tested, [train]))
    seen = [concept for concept, part in zip(concepts, parts, strict=True) if part != NEW_CONCEPTS]
    return groups, sorted(widely_drawn(seen))


def warn_of_other_counts(sources: Sequence[Source], pairs: Sequence[IconPair], status: StatusLine) -> None:
    counts = Counter(pair.drawing.source.name for pair in pairs)
    for source in sources:
        if counts[source.name] != source.expected:
            status.say(
                f"warning: {source.name} gave {counts[source.name]:,} images instead of {source.expected:,}; "
                f"another version of {source.package} than the tested one?"
            )


def warn_of_other_parts(parts: Mapping[str, Sequence[IconPair]], status: StatusLine) -> None:
    for part, expected in EXPECTED_PAIRS.items():
        if len(parts[part]) != expected:
            status.say(f"warning: {part} has {len(parts[part]):,} pairs instead of {expected:,}")
