"""Which pair is for training and which for testing: a fixed rule of names and hashes, no random generator.

- `new-concepts`: every pair whose caption holds one of 100 words (heldout_concepts.txt); never trained on.
- `new-drawings`: the concept is trained on in drawings of other families; this family's are held out.
- `train`: the rest. Test images with a near duplicate in it are dropped.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple, TypeVar

import numpy as np

from neuclip.datasets.captions import singular, words_of
from neuclip.datasets.near_duplicates import Thumbnails, has_near_duplicate

TRAIN, NEW_DRAWINGS, NEW_CONCEPTS = "train", "new-drawings", "new-concepts"
PARTS = (TRAIN, NEW_DRAWINGS, NEW_CONCEPTS)
FEWEST_FAMILIES = 3  # a caption that so many families draw may be held out in one of them
PERCENT_HELD_OUT = 50


@dataclass(frozen=True)
class Pair:
    """An image with its caption, before it has a place in a shard; each set adds what it knows of it."""

    id: str
    caption: str
    family: str  # drawings of one origin, in all their styles


AnyPair = TypeVar("AnyPair", bound=Pair)


class Concept(NamedTuple):
    """What decides about a pair's part."""

    caption: str
    family: str


def heldout_concepts() -> frozenset[str]:
    """The held-out words. A list and not the rule that chose it: new package versions cannot change it."""
    return frozenset(files("neuclip.datasets").joinpath("heldout_concepts.txt").read_text(encoding="utf-8").split())


def split_by_concept(concepts: Sequence[Concept], held_out_words: Set[str]) -> list[str]:
    """The part of every pair, before near duplicates are dropped."""
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


def held_out_positions(parts: Sequence[str | None]) -> np.ndarray:
    return np.array([part not in (None, TRAIN) for part in parts], dtype=bool).nonzero()[0]


def train_positions(parts: Sequence[str | None]) -> np.ndarray:
    return np.array([part == TRAIN for part in parts], dtype=bool).nonzero()[0]


def drop_near_duplicates(
    parts: Sequence[str | None], tested: Thumbnails, train: Iterable[Thumbnails]
) -> list[str | None]:
    """The parts again, with None for test images that have a near duplicate in train.

    `tested`: at the tested positions, in their order. `train`: everything that is trained on, in any number of pieces.
    """
    duplicate = np.zeros(len(tested.grey), dtype=bool)
    for piece in train:
        unmatched = np.flatnonzero(~duplicate)
        duplicate[unmatched] = has_near_duplicate(tested.rows(unmatched), piece)
    kept: list[str | None] = list(parts)
    for position in held_out_positions(parts)[duplicate]:
        kept[position] = None
    return kept


def group_by_part(pairs: Sequence[AnyPair], parts: Sequence[str | None]) -> dict[str, list[AnyPair]]:
    """The pairs of every part; those whose part is None are in none."""
    groups: dict[str, list[AnyPair]] = {part: [] for part in PARTS}
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
