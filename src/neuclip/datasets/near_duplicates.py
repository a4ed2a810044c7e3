"""Equal images and near duplicates: a test image must not have been trained on under another name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

GREY_SIDE = 24
COLOUR_SIDE = 32
# Both set by looking at pairs around them. Strict on purpose: clocks and letters in boxes count as near duplicates.
LEAST_COSINE = 0.98
MOST_DIFFERENCE = 0.03
ROUNDING = 1e-4  # float32 products only pick candidates; the decision is made in whole numbers, equal on every machine
BLOCK_ROWS = 512
BLOCK_PAIRS = 4096


@dataclass(frozen=True)
class Thumbnails:
    """What near duplicates are recognised by: grey (n, 576) with ink high and white 0, colour (n, 3072), both uint8."""

    grey: np.ndarray
    colour: np.ndarray

    def rows(self, chosen: np.ndarray) -> Thumbnails:
        return Thumbnails(self.grey[chosen], self.colour[chosen])


def thumbnail(pixels: np.ndarray) -> tuple[bytes, bytes]:
    """Grey and colour thumbnail of a uint8 image (64, 64, 3)."""
    image = Image.fromarray(pixels)
    grey = image.convert("L").resize((GREY_SIDE, GREY_SIDE), Image.Resampling.BOX)
    colour = image.resize((COLOUR_SIDE, COLOUR_SIDE), Image.Resampling.BOX)
    return (255 - np.asarray(grey)).tobytes(), colour.tobytes()


def stack_thumbnails(thumbnails: Sequence[tuple[bytes, bytes]]) -> Thumbnails:
    count = len(thumbnails)
    grey = np.frombuffer(b"".join(grey for grey, _ in thumbnails), np.uint8).reshape(count, GREY_SIDE**2)
    colour = np.frombuffer(b"".join(colour for _, colour in thumbnails), np.uint8).reshape(count, 3 * COLOUR_SIDE**2)
    return Thumbnails(grey, colour)


def unique_images(digests: Sequence[bytes], captions: Sequence[str]) -> list[int]:
    """Positions to keep for each image to occur once: of equal ones the shortest caption, then the first.

    The shortest caption is the most general one: `farmer` rather than `man farmer`.
    """
    best: dict[bytes, int] = {}
    for position, digest in enumerate(digests):
        kept = best.setdefault(digest, position)
        if len(captions[position]) < len(captions[kept]):
            best[digest] = position
    return sorted(best.values())


def has_near_duplicate(tested: Thumbnails, others: Thumbnails) -> np.ndarray:
    """bool (n,): which of the tested images have a near duplicate among the others."""
    duplicate = np.zeros(len(tested.grey), dtype=bool)
    if not len(others.grey):
        return duplicate
    unit_others = _unit_rows(others.grey).T
    for start in range(0, len(duplicate), BLOCK_ROWS):
        cosine = _unit_rows(tested.grey[start : start + BLOCK_ROWS]) @ unit_others
        rows, columns = np.nonzero(cosine >= LEAST_COSINE - ROUNDING)
        for pair in range(0, len(rows), BLOCK_PAIRS):
            left, right = rows[pair : pair + BLOCK_PAIRS] + start, columns[pair : pair + BLOCK_PAIRS]
            duplicate[left[are_near_duplicates(tested.rows(left), others.rows(right))]] = True
    return duplicate


def are_near_duplicates(left: Thumbnails, right: Thumbnails) -> np.ndarray:
    """bool (n,): whether row i of one and row i of the other are near duplicates."""
    first, second = left.grey.astype(np.int64), right.grey.astype(np.int64)
    product = (first * second).sum(axis=1)
    lengths = np.sqrt((first * first).sum(axis=1) * (second * second).sum(axis=1).astype(np.float64))
    difference = np.abs(left.colour.astype(np.int16) - right.colour).sum(axis=1, dtype=np.int64)
    most = MOST_DIFFERENCE * 255 * left.colour.shape[1]
    return (product >= LEAST_COSINE * lengths) & (difference <= most)


def _unit_rows(grey: np.ndarray) -> np.ndarray:
    values = grey.astype(np.float32)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return values / np.maximum(lengths, 1.0)
