"""Splits the images into training and test parts, by a fixed rule of names and hashes without a random generator.

- `new-concepts`: every image whose caption contains one of 100 held-out words (heldout_concepts.txt).
- `new-drawings`: concepts that `train` has in the drawings of other families; one family's drawings are held out.
- `train`: all other images. Test images with a near duplicate in `train` are dropped.
"""

from __future__ import annotations

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np
from PIL import Image

from neuclip.progress import track
from neuclip_icons.drawing import GREY_SIDE, Drawn
from neuclip_icons.names import singular, without_skin_tones, words_of
from neuclip_icons.sources import Source

TRAIN, NEW_DRAWINGS, NEW_CONCEPTS = "train", "new-drawings", "new-concepts"
PARTS = (TRAIN, NEW_DRAWINGS, NEW_CONCEPTS)
FEWEST_FAMILIES = 3  # a caption that at least this many families draw may be held out in one of them
PERCENT_HELD_OUT = 50
COLOUR_SIDE = 32
# Both were set by looking at pairs near the thresholds. They are strict: clocks, and letters in boxes, count as near
# duplicates of each other.
LEAST_COSINE = 0.98
MOST_DIFFERENCE = 0.03
ROUNDING = 1e-4  # float32 products only pick candidates; `is_near` decides in integers, equally on every machine
BLOCK = 4096


class Concept(NamedTuple):
    """The caption and the family, which decide the part of an image. All skin tones of an emoji are one concept."""

    caption: str
    family: str


@dataclass(frozen=True, eq=False)
class Icon:
    """A drawn image with its name and caption."""

    source: Source
    name: str
    caption: str
    drawn: Drawn

    @property
    def id(self) -> str:
        return f"{self.source.name}/{self.name}"

    @property
    def concept(self) -> Concept:
        return Concept(without_skin_tones(self.caption), self.source.family)


@cache
def heldout_words() -> frozenset[str]:
    """The held-out words. They are a fixed list, which new package versions cannot change."""
    words = files("neuclip_icons").joinpath("heldout_concepts.txt").read_text(encoding="utf-8").split()
    return frozenset(map(singular, words))


def has_heldout_word(text: str) -> bool:
    return not heldout_words().isdisjoint(words_of(text))


def unique(icons: Iterable[Icon]) -> list[Icon]:
    """The icons without repeated images. Of equal images, the one with the shortest caption is kept, then the first.

    The shortest caption is the most general one: `farmer` rather than `man farmer`.
    """
    best: dict[bytes, tuple[int, Icon]] = {}
    for position, icon in enumerate(icons):
        _, kept = best.setdefault(icon.drawn.digest, (position, icon))
        if len(icon.caption) < len(kept.caption):
            best[icon.drawn.digest] = position, icon
    return [icon for _, icon in sorted(best.values(), key=lambda one: one[0])]


def split_by_concept(concepts: Sequence[Concept]) -> list[str]:
    """The part of every concept."""
    held_family = {caption: _held_family(caption, families) for caption, families in widely_drawn(concepts).items()}
    parts = []
    for caption, family in concepts:
        if has_heldout_word(caption):
            parts.append(NEW_CONCEPTS)
        else:
            parts.append(NEW_DRAWINGS if held_family.get(caption) == family else TRAIN)
    return parts


def widely_drawn(concepts: Iterable[Concept]) -> dict[str, set[str]]:
    """The families that draw each caption, for captions without a held-out word that at least three families draw."""
    drawn_by: dict[str, set[str]] = defaultdict(set)
    for caption, family in concepts:
        drawn_by[caption].add(family)
    return {
        caption: families
        for caption, families in drawn_by.items()
        if len(families) >= FEWEST_FAMILIES and not has_heldout_word(caption)
    }


def _held_family(caption: str, families: Set[str]) -> str | None:
    if number_from(f"pick|{caption}") % 100 >= PERCENT_HELD_OUT:
        return None
    return min(families, key=lambda family: number_from(f"drawing|{caption}|{family}"))


def number_from(text: str) -> int:
    """A pseudo-random number from 0 to 2^48 - 1, the same on every machine."""
    return int(hashlib.sha256(text.encode("utf-8")).hexdigest()[:12], 16)


def shuffle(icons: Iterable[Icon]) -> list[Icon]:
    """The icons in a pseudo-random order that is always the same.

    Without it, the first shard would contain only emoji and the last only outlines. A reader of one shard, or of the
    first thousand pairs, must see a fair mixture.
    """
    return sorted(icons, key=lambda icon: hashlib.sha256(icon.id.encode()).digest())


def near_duplicates(tested: Sequence[Icon], others: Sequence[Icon]) -> set[Icon]:
    """The tested images that have a near duplicate among the others."""
    colour = cache(lambda icon: _colour_thumbnail(icon.drawn.png))
    duplicates: set[Icon] = set()
    starts = range(0, len(others), BLOCK)
    for start in track(starts, "looking for near duplicates", len(starts), "blocks"):
        block = others[start : start + BLOCK]
        grey_others = _grey(block)
        unit_others = _unit_rows(grey_others).T
        for first in range(0, len(tested), BLOCK):
            remaining = [icon for icon in tested[first : first + BLOCK] if icon not in duplicates]
            grey = _grey(remaining)
            rows, columns = np.nonzero(_unit_rows(grey) @ unit_others >= LEAST_COSINE - ROUNDING)
            for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
                icon, other = remaining[row], block[column]
                if icon not in duplicates and is_near(grey[row], grey_others[column], colour(icon), colour(other)):
                    duplicates.add(icon)
    return duplicates


def is_near(grey: np.ndarray, other_grey: np.ndarray, colour: np.ndarray, other_colour: np.ndarray) -> bool:
    """Whether two images are near duplicates, by their thumbnails: grey (576,), colour (3072,), both uint8."""
    first, second = grey.astype(np.int64), other_grey.astype(np.int64)
    lengths = np.sqrt((first * first).sum() * (second * second).sum().astype(np.float64))
    difference = np.abs(colour.astype(np.int16) - other_colour).sum(dtype=np.int64)
    return bool((first * second).sum() >= LEAST_COSINE * lengths and difference <= MOST_DIFFERENCE * 255 * len(colour))


def _colour_thumbnail(png: bytes) -> np.ndarray:  # -> (3072,) uint8
    image = Image.open(io.BytesIO(png)).resize((COLOUR_SIDE, COLOUR_SIDE), Image.Resampling.BOX)
    return np.asarray(image).reshape(-1)


def _grey(icons: Sequence[Icon]) -> np.ndarray:  # -> (n, 576) uint8
    return np.frombuffer(b"".join(icon.drawn.grey for icon in icons), np.uint8).reshape(len(icons), GREY_SIDE**2)


def _unit_rows(grey: np.ndarray) -> np.ndarray:  # -> (n, 576) float32
    values = grey.astype(np.float32)
    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1.0)
