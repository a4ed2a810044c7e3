"""Which pair is for training and which for testing: a fixed rule of names and hashes, no random generator.

- `new-concepts`: every pair whose caption holds one of 100 words (heldout_concepts.txt); never trained on.
- `new-drawings`: the concept is trained on in drawings of other families; this family's are kept out.
- `train`: the rest. Test images with a near twin in it are dropped.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from neuclip.datasets.icons.captions import singular, words_of
from neuclip.datasets.icons.near_duplicates import Thumbnails, has_near_twin

TRAIN, NEW_DRAWINGS, NEW_CONCEPTS = "train", "new-drawings", "new-concepts"
SPLITS = (TRAIN, NEW_DRAWINGS, NEW_CONCEPTS)
FAMILIES_TO_COMPARE = 3  # a caption drawn by that many hands may give one of them away
PERCENT_HELD_OUT = 50


class Named(NamedTuple):
    """What the split looks at."""

    caption: str
    family: str


def heldout_concepts() -> frozenset[str]:
    """The held-out words. A list and not the rule that chose it, so that new package versions cannot move it."""
    text = files("neuclip.datasets.icons").joinpath("heldout_concepts.txt").read_text(encoding="utf-8")
    return frozenset(text.split())


def split_pairs(pairs: Sequence[Named], concepts: Set[str]) -> list[str]:
    """The split of every pair, before twins are looked for."""
    held_words = {singular(word) for word in concepts}
    is_concept = [not held_words.isdisjoint(words_of(pair.caption)) for pair in pairs]
    seen = [pair for pair, new in zip(pairs, is_concept, strict=True) if not new]
    held_family = {caption: _held_family(caption, families) for caption, families in comparable_captions(seen).items()}
    return [
        NEW_CONCEPTS if new else NEW_DRAWINGS if held_family.get(pair.caption) == pair.family else TRAIN
        for pair, new in zip(pairs, is_concept, strict=True)
    ]


def comparable_captions(pairs: Sequence[Named]) -> Mapping[str, set[str]]:
    """Captions drawn by at least three families, each with its families."""
    families: dict[str, set[str]] = defaultdict(set)
    for pair in pairs:
        families[pair.caption].add(pair.family)
    return {caption: drawn_by for caption, drawn_by in families.items() if len(drawn_by) >= FAMILIES_TO_COMPARE}


def drop_twins_of_train(splits: Sequence[str], thumbnails: Thumbnails) -> list[str | None]:
    """The splits again, with None for test images that have a near twin in train."""
    of_train = np.array([split == TRAIN for split in splits], dtype=bool)
    tested = np.flatnonzero(~of_train)
    twins = has_near_twin(thumbnails.rows(tested), thumbnails.rows(np.flatnonzero(of_train)))
    result: list[str | None] = list(splits)
    for position in tested[twins]:
        result[position] = None
    return result


def trainable_tags(tags: Sequence[str], concepts: Set[str]) -> list[str]:
    """Keywords without those that would give a held-out word away."""
    held_words = {singular(word) for word in concepts}
    return [tag for tag in tags if held_words.isdisjoint(words_of(tag))]


def number_from(text: str) -> int:
    """A number from 0 to 2^48 - 1 that looks random and is the same everywhere."""
    return int(hashlib.sha256(text.encode("utf-8")).hexdigest()[:12], 16)


def _held_family(caption: str, families: Set[str]) -> str | None:
    if number_from(f"pick|{caption}") % 100 >= PERCENT_HELD_OUT:
        return None
    return min(families, key=lambda family: number_from(f"drawing|{caption}|{family}"))
