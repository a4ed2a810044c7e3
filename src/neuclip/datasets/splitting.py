"""Which image is for training and which for testing: a fixed rule of names and hashes, no random generator.

- `new-concepts`: every image whose caption holds one of 100 words (heldout_concepts.txt); never trained on.
- `new-drawings`: the concept is trained on in drawings of other families; this family's are held out.
- `train`: the rest. Test images with a near duplicate in it are dropped.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.resources import files
from typing import Generic, NamedTuple

import numpy as np

from neuclip.datasets.captions import singular, without_skin_tones, words_of
from neuclip.datasets.drawn import AnyCollection, DrawnCollection, Names
from neuclip.datasets.near_duplicates import Thumbnails, has_near_duplicate, unique_images
from neuclip.progress import track

TRAIN, NEW_DRAWINGS, NEW_CONCEPTS = "train", "new-drawings", "new-concepts"
PARTS = (TRAIN, NEW_DRAWINGS, NEW_CONCEPTS)
FEWEST_FAMILIES = 3  # a caption that so many families draw may be held out in one of them
PERCENT_HELD_OUT = 50


class Concept(NamedTuple):
    """What decides about an image's part. All skin tones of an emoji are one concept."""

    caption: str
    family: str


@dataclass(frozen=True)
class Pair(Generic[AnyCollection]):
    """An image that occurs once, with its captions; the pixels stay in the file of its collection."""

    collection: AnyCollection
    names: Names
    place: tuple[int, int] = (0, 0)  # number of its collection, position there

    @property
    def id(self) -> str:
        return f"{self.collection.name}/{self.names.name}"

    @property
    def caption(self) -> str:
        return self.names.captions[0]

    @property
    def concept(self) -> Concept:
        return Concept(without_skin_tones(self.caption), self.collection.family)


def heldout_concepts() -> frozenset[str]:
    """The held-out words. A list and not the rule that chose it: new package versions cannot change it."""
    return frozenset(files("neuclip.datasets").joinpath("heldout_concepts.txt").read_text(encoding="utf-8").split())


def different_images(drawn: Sequence[DrawnCollection[AnyCollection]]) -> list[Pair[AnyCollection]]:
    """All drawings without repeated images; of equal ones the shortest caption stays, then the first."""
    pairs = [
        Pair(one.collection, names, (number, position))
        for number, one in enumerate(drawn)
        for position, names in enumerate(one.names)
    ]
    digests = [digest for one in drawn for digest in one.digests()]
    return [pairs[position] for position in unique_images(digests, [pair.caption for pair in pairs])]


def split_by_concept(concepts: Sequence[Concept], held_out_words: Set[str]) -> list[str]:
    """The part of every concept."""
    held_words = {singular(word) for word in held_out_words}
    is_new = [not held_words.isdisjoint(words_of(concept.caption)) for concept in concepts]
    seen = [concept for concept, new in zip(concepts, is_new, strict=True) if not new]
    held_family = {caption: _held_family(caption, families) for caption, families in widely_drawn(seen).items()}
    return [
        NEW_CONCEPTS if new else NEW_DRAWINGS if held_family.get(concept.caption) == concept.family else TRAIN
        for concept, new in zip(concepts, is_new, strict=True)
    ]


def widely_drawn(concepts: Sequence[Concept]) -> Mapping[str, set[str]]:
    """Captions drawn by at least three families, each with its families."""
    families: dict[str, set[str]] = defaultdict(set)
    for concept in concepts:
        families[concept.caption].add(concept.family)
    return {caption: drawn_by for caption, drawn_by in families.items() if len(drawn_by) >= FEWEST_FAMILIES}


def show_one_style(pairs: Sequence[Pair[AnyCollection]], parts: Sequence[str]) -> list[str | None]:
    """The parts again, with None for all but one drawing of a held-out concept in each family.

    Its dozen sizes and styles are not a dozen tests. They are in no part, because a model that was trained on them
    would know the tested one.
    """
    held_out: dict[Concept, list[int]] = defaultdict(list)
    for position in held_out_positions(parts):
        held_out[pairs[position].concept].append(position)
    kept: list[str | None] = list(parts)
    for positions in held_out.values():
        shown = min(positions, key=lambda position: number_from(f"show|{pairs[position].id}"))
        for position in positions:
            if position != shown:
                kept[position] = None
    return kept


def drop_near_duplicates(
    pairs: Sequence[Pair[AnyCollection]],
    parts: Sequence[str | None],
    drawn: Sequence[DrawnCollection[AnyCollection]],
) -> list[str | None]:
    """The parts again, with None for test images that have a near duplicate in train."""
    held_out = held_out_positions(parts)
    pieces = list(_thumbnails([pairs[position] for position in held_out], drawn))
    tested = Thumbnails(np.concatenate([one.grey for one in pieces]), np.concatenate([one.colour for one in pieces]))
    duplicate = np.zeros(len(held_out), dtype=bool)
    train = _thumbnails([pair for pair, part in zip(pairs, parts, strict=True) if part == TRAIN], drawn)
    for piece in track(train, "looking for near duplicates", len(drawn), "collections"):
        unmatched = np.flatnonzero(~duplicate)
        duplicate[unmatched] = has_near_duplicate(tested.rows(unmatched), piece)
    kept = list(parts)
    for position in held_out[duplicate]:
        kept[position] = None
    return kept


def held_out_positions(parts: Sequence[str | None]) -> np.ndarray:
    return np.array([part not in (None, TRAIN) for part in parts], dtype=bool).nonzero()[0]


def group_by_part(
    pairs: Sequence[Pair[AnyCollection]], parts: Sequence[str | None]
) -> dict[str, list[Pair[AnyCollection]]]:
    """The pairs of every part; those whose part is None are in none."""
    groups: dict[str, list[Pair[AnyCollection]]] = {part: [] for part in PARTS}
    for pair, part in zip(pairs, parts, strict=True):
        if part:
            groups[part].append(pair)
    return groups


def without_words(texts: Sequence[str], held_out_words: Set[str]) -> list[str]:
    """Keywords or captions without those that would give a held-out word away."""
    held_words = {singular(word) for word in held_out_words}
    return [text for text in texts if held_words.isdisjoint(words_of(text))]


def number_from(text: str) -> int:
    """A number from 0 to 2^48 - 1 that looks random and is the same everywhere."""
    return int(hashlib.sha256(text.encode("utf-8")).hexdigest()[:12], 16)


def _held_family(caption: str, families: Set[str]) -> str | None:
    if number_from(f"pick|{caption}") % 100 >= PERCENT_HELD_OUT:
        return None
    return min(families, key=lambda family: number_from(f"drawing|{caption}|{family}"))


def _thumbnails(
    pairs: Sequence[Pair[AnyCollection]], drawn: Sequence[DrawnCollection[AnyCollection]]
) -> Iterator[Thumbnails]:
    """One collection at a time, in the order of the pairs, which are sorted by collection."""
    rows: list[list[int]] = [[] for _ in drawn]
    for pair in pairs:
        number, row = pair.place
        rows[number].append(row)
    for one, chosen in zip(drawn, rows, strict=True):
        yield one.thumbnails(np.array(chosen, dtype=np.int64))
