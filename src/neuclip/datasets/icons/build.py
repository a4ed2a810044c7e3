"""Building icons-30k: list the drawings, draw them, drop equal images and near twins, write everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from neuclip.datasets.icons.emoji_table import read_emoji_table
from neuclip.datasets.icons.listing import Drawing, list_drawings
from neuclip.datasets.icons.near_duplicates import first_of_each_image, stack_thumbnails
from neuclip.datasets.icons.packages import Source, missing_packages, present_sources
from neuclip.datasets.icons.pair import Pair
from neuclip.datasets.icons.rasteriser import RASTERISER
from neuclip.datasets.icons.split import (
    NEW_CONCEPTS,
    NEW_DRAWINGS,
    SPLITS,
    TRAIN,
    comparable_captions,
    drop_twins_of_train,
    heldout_concepts,
    split_pairs,
)
from neuclip.datasets.icons.workers import draw_all
from neuclip.datasets.icons.writing import write_notes, write_split, write_zero_shot
from neuclip.errors import UserError
from neuclip.progress import StatusLine, track

EXPECTED_PAIRS = {TRAIN: 27424, NEW_DRAWINGS: 1144, NEW_CONCEPTS: 1542}  # of the tested package versions


def build(folder: Path, *, processes: int = 2) -> None:
    """Build the whole set into `folder`, with progress on stderr: a minute on two free cores, under 1 GB of memory."""
    status = StatusLine()
    sources = usable_sources(status)
    status.show(f"listing the drawings of {len(sources)} sources")
    pairs = draw_pairs(list_all(sources), processes)
    warn_of_other_counts(sources, pairs, status)
    pairs = without_equal_images(pairs)
    status.show(f"looking for near twins among {len(pairs):,} different images")
    splits, names = split_all(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for split, chosen in splits.items():
        write_split(folder / split, chosen, hide=heldout_concepts() if split == TRAIN else frozenset())
    status.show("writing the zero-shot tasks")
    write_zero_shot(folder / "zero-shot", splits[NEW_DRAWINGS], splits[NEW_CONCEPTS], names)
    write_notes(folder, sources, splits)
    if not missing_packages():
        warn_of_other_splits(splits, status)
    status.close()


def usable_sources(status: StatusLine) -> list[Source]:
    """The installed sources; says which are missing, and refuses when nothing could be drawn."""
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


def draw_pairs(drawings: Sequence[Drawing], processes: int) -> list[Pair]:
    """Every drawing that shows something, in the order of the list."""
    drawn = draw_all([drawing.image for drawing in drawings], processes)
    shown = track(zip(drawings, drawn, strict=True), "drawing", len(drawings), "images")
    return [Pair(drawing, image) for drawing, image in shown if image]


def without_equal_images(pairs: Sequence[Pair]) -> list[Pair]:
    kept = first_of_each_image([pair.drawn.digest for pair in pairs], [pair.caption for pair in pairs])
    return [pairs[position] for position in kept]


def split_all(pairs: Sequence[Pair]) -> tuple[dict[str, list[Pair]], list[str]]:
    """The pairs of every split, and the captions that three families or more draw (a zero-shot task)."""
    named = [pair.named for pair in pairs]
    before_twins = split_pairs(named, heldout_concepts())
    seen = [name for name, split in zip(named, before_twins, strict=True) if split != NEW_CONCEPTS]
    after_twins = drop_twins_of_train(before_twins, stack_thumbnails([pair.drawn.thumbnail for pair in pairs]))
    splits: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    for pair, split in zip(pairs, after_twins, strict=True):
        if split:
            splits[split].append(pair)
    return splits, sorted(comparable_captions(seen))


def warn_of_other_counts(sources: Sequence[Source], pairs: Sequence[Pair], status: StatusLine) -> None:
    counts = Counter(pair.drawing.source.name for pair in pairs)
    for source in sources:
        if counts[source.name] != source.expected:
            status.say(
                f"warning: {source.name} gave {counts[source.name]:,} images instead of {source.expected:,}; "
                f"another version of {source.package} than the tested one?"
            )


def warn_of_other_splits(splits: Mapping[str, Sequence[Pair]], status: StatusLine) -> None:
    for split, expected in EXPECTED_PAIRS.items():
        if len(splits[split]) != expected:
            status.say(f"warning: {split} has {len(splits[split]):,} pairs instead of {expected:,}")
