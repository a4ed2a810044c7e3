"""Which icons are for training and which for testing: the common rule (datasets/splitting.py), with two additions.

- All skin tones of an emoji go where the emoji goes.
- Of a tested concept, each family shows one drawing: its dozen sizes and styles are not a dozen tests. The others are
  in no part, because a model that was trained on them would know the tested one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from neuclip.datasets.iconify.captions import concept_of
from neuclip.datasets.iconify.collections import Collection, family_of
from neuclip.datasets.iconify.drawing import DrawnCollection, DrawnIcon
from neuclip.datasets.near_duplicates import Thumbnails, unique_images
from neuclip.datasets.splitting import (
    Concept,
    Pair,
    drop_near_duplicates,
    group_by_part,
    held_out_positions,
    heldout_concepts,
    number_from,
    split_by_concept,
    train_positions,
)
from neuclip.progress import StatusLine, track


@dataclass(frozen=True)
class IconifyPair(Pair):
    """An icon whose image occurs once."""

    collection: Collection
    icon: DrawnIcon
    place: tuple[int, int]  # number of its collection, position there


def split_all(drawn: Sequence[DrawnCollection]) -> tuple[dict[str, list[IconifyPair]], Mapping[str, int]]:
    """The pairs of every part, and how many drawn icons are in none, by reason."""
    status = StatusLine()
    status.show("looking for equal images")
    pairs = different_images(drawn)
    status.show(f"splitting {len(pairs):,} different images")
    parts = split_by_name(pairs, heldout_concepts())
    status.close()
    tested = list(_thumbnails(pairs, held_out_positions(parts), drawn))
    train = _thumbnails(pairs, train_positions(parts), drawn)
    kept = drop_near_duplicates(
        parts,
        Thumbnails(np.concatenate([one.grey for one in tested]), np.concatenate([one.colour for one in tested])),
        track(train, "looking for near duplicates", len(drawn), "collections"),
    )
    in_no_part = parts.count(None)
    return group_by_part(pairs, kept), {
        "equal to another image": sum(len(one.icons) for one in drawn) - len(pairs),
        "other sizes and styles of tested drawings": in_no_part,
        "test images with a near duplicate in train": kept.count(None) - in_no_part,
    }


def different_images(drawn: Sequence[DrawnCollection]) -> list[IconifyPair]:
    """All drawn icons without repeated images; of equal ones the shortest caption stays, then the first."""
    pairs = [
        make_pair(one.collection, icon, (number, position))
        for number, one in enumerate(drawn)
        for position, icon in enumerate(one.icons)
    ]
    digests = [digest for one in drawn for digest in one.digests()]
    return [pairs[position] for position in unique_images(digests, [pair.caption for pair in pairs])]


def make_pair(collection: Collection, icon: DrawnIcon, place: tuple[int, int]) -> IconifyPair:
    family = family_of(collection.prefix)
    return IconifyPair(f"{collection.prefix}/{icon.name}", icon.captions[0], family, collection, icon, place)


def split_by_name(pairs: Sequence[IconifyPair], held_out_words: Set[str]) -> list[str | None]:
    """The part of every pair, before near duplicates are dropped; None for those in no part."""
    concepts = [Concept(concept_of(pair.caption), pair.family) for pair in pairs]
    parts: list[str | None] = list(split_by_concept(concepts, held_out_words))
    tested: dict[Concept, list[int]] = defaultdict(list)
    for position in held_out_positions(parts):
        tested[concepts[position]].append(position)
    for positions in tested.values():
        shown = min(positions, key=lambda position: number_from(f"show|{pairs[position].id}"))
        for position in positions:
            if position != shown:
                parts[position] = None
    return parts


def _thumbnails(
    pairs: Sequence[IconifyPair], positions: Sequence[int] | np.ndarray, drawn: Sequence[DrawnCollection]
) -> Iterator[Thumbnails]:
    """Of the pairs at these positions, one collection at a time; in their order, as pairs are sorted by collection."""
    rows: list[list[int]] = [[] for _ in drawn]
    for position in positions:
        number, row = pairs[position].place
        rows[number].append(row)
    for one, chosen in zip(drawn, rows, strict=True):
        yield one.thumbnails(np.array(chosen, dtype=np.int64))
