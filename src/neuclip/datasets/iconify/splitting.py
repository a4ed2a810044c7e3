"""Which pairs are for training and which for testing: the rule of icons-30k (icons/split.py), with two additions.

- All skin tones of an emoji go where the emoji goes.
- Of a concept that is tested, one drawing per family is: its dozen sizes and styles are no dozen tests. The others
  are in no part, because a model that was trained on them would know the tested one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neuclip.datasets.iconify.captions import concept_of
from neuclip.datasets.iconify.collection_progress import CollectionProgress
from neuclip.datasets.iconify.collections import Collection
from neuclip.datasets.iconify.drawing import Drawings, Row
from neuclip.datasets.iconify.families import family_of
from neuclip.datasets.icons.near_duplicates import Thumbnails, first_of_each_image, has_near_twin
from neuclip.datasets.icons.split import TRAIN, Named, number_from, split_pairs

Place = tuple[int, int]  # of a drawing: which collection, which row


@dataclass(frozen=True)
class Pair:
    """An image that occurs once, with all that is known of it but its pixels."""

    collection: Collection
    row: Row
    place: Place

    @property
    def id(self) -> str:
        return f"{self.collection.prefix}/{self.row.name}"

    @property
    def family(self) -> str:
        return family_of(self.collection.prefix)

    @property
    def caption(self) -> str:
        return self.row.captions[0]


def different_images(drawings: Sequence[Drawings]) -> list[Pair]:
    """All drawn icons without repeated images; of equal ones the shortest caption stays, then the first."""
    pairs = [
        Pair(of_one.collection, row, (number, position))
        for number, of_one in enumerate(drawings)
        for position, row in enumerate(of_one.rows)
    ]
    digests = [digest for of_one in drawings for digest in of_one.digests()]
    return [pairs[position] for position in first_of_each_image(digests, [pair.caption for pair in pairs])]


def split_by_names(pairs: Sequence[Pair], concepts: frozenset[str]) -> list[str | None]:
    """The part of every pair, before twins are looked for; None for those in no part."""
    named = [Named(concept_of(pair.caption), pair.family) for pair in pairs]
    splits: list[str | None] = list(split_pairs(named, concepts))
    held: dict[Named, list[int]] = defaultdict(list)
    for position, (name, split) in enumerate(zip(named, splits, strict=True)):
        if split != TRAIN:
            held[name].append(position)
    for positions in held.values():
        shown = min(positions, key=lambda position: number_from(f"show|{pairs[position].id}"))
        for position in positions:
            if position != shown:
                splits[position] = None
    return splits


def drop_twins_of_train(
    pairs: Sequence[Pair], splits: Sequence[str | None], drawings: Sequence[Drawings]
) -> list[str | None]:
    """The splits again, with None for test images that have a near twin in train; one collection at a time."""
    tested = [position for position, split in enumerate(splits) if split not in (None, TRAIN)]
    of_train = [pairs[position].place for position, split in enumerate(splits) if split == TRAIN]
    questioned = _thumbnails([pairs[position].place for position in tested], drawings)
    twins = np.zeros(len(tested), dtype=bool)
    rows = _rows_by_collection(of_train, len(drawings))
    progress = CollectionProgress("looking for near twins", len(of_train))
    for of_one, chosen in zip(drawings, rows, strict=True):
        progress.show(of_one.collection.prefix)
        open_questions = np.flatnonzero(~twins)
        twins[open_questions] = has_near_twin(questioned.rows(open_questions), of_one.thumbnails(chosen))
        progress.done += len(chosen)
    progress.close()
    result = list(splits)
    for position, twin in zip(tested, twins, strict=True):
        if twin:
            result[position] = None
    return result


def _thumbnails(places: Sequence[Place], drawings: Sequence[Drawings]) -> Thumbnails:
    """Of these places, in their order; places are sorted by collection, as pairs are."""
    rows = _rows_by_collection(places, len(drawings))
    found = [of_one.thumbnails(chosen) for of_one, chosen in zip(drawings, rows, strict=True)]
    return Thumbnails(np.concatenate([one.grey for one in found]), np.concatenate([one.colour for one in found]))


def _rows_by_collection(places: Sequence[Place], collections: int) -> list[np.ndarray]:
    rows: list[list[int]] = [[] for _ in range(collections)]
    for number, row in places:
        rows[number].append(row)
    return [np.array(chosen, dtype=np.int64) for chosen in rows]
