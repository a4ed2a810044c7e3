"""Which drawing is for training and which for testing: by groups that look alike, and a hash instead of chance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from neuclip.data.named.icons.split import number_from
from neuclip.data.named.icons.twins import LEAST_COSINE, ROUNDING

TRAIN, TEST = "train", "test"
PERCENT_OF_TEST = 15
BLOCK_ROWS = 512


def split_in_groups(keys: Sequence[str], series: Sequence[str], grey: np.ndarray) -> list[str]:
    """The part of every picture. Drawings of one name by one author, and drawings that look alike, stay together.

    Otherwise a test picture would often be a drawing of training in another colour (`button blue`, `button red`).
    `grey` (n, 576) holds grey thumbnails with ink high and paper 0.
    """
    group = _Groups(len(keys))
    first_of: dict[str, int] = {}
    for position, name in enumerate(series):
        group.join(position, first_of.setdefault(name, position))
    for left, right in alike(grey):
        group.join(left, right)
    # The smallest key speaks for its group, so that the order of the list changes nothing.
    speaker: dict[int, str] = {}
    for position, key in enumerate(keys):
        root = group.root(position)
        speaker[root] = min(key, speaker.get(root, key))
    return [
        TEST if number_from(f"test|{speaker[group.root(position)]}") % 100 < PERCENT_OF_TEST else TRAIN
        for position in range(len(keys))
    ]


def alike(grey: np.ndarray) -> list[tuple[int, int]]:
    """All pairs (i, j), i < j, of the same ink in the same places, whatever its colour."""
    whole = grey.astype(np.int64)
    squares = (whole * whole).sum(axis=1)
    unit = grey / np.sqrt(np.maximum(squares, 1), dtype=np.float32)[:, None]
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(unit), BLOCK_ROWS):
        rows, right = np.nonzero(unit[start : start + BLOCK_ROWS] @ unit.T >= LEAST_COSINE - ROUNDING)
        left = rows + start
        left, right = left[left < right], right[left < right]
        # Float products only pick candidates; whole numbers decide, equally on every machine.
        sure = (whole[left] * whole[right]).sum(axis=1) >= LEAST_COSINE * np.sqrt(squares[left] * squares[right])
        pairs += zip(left[sure].tolist(), right[sure].tolist(), strict=True)
    return pairs


class _Groups:
    """Numbers that are joined into groups; a group's root is its smallest number."""

    def __init__(self, size: int):
        self.parent = list(range(size))

    def root(self, number: int) -> int:
        while self.parent[number] != number:
            self.parent[number] = self.parent[self.parent[number]]
            number = self.parent[number]
        return number

    def join(self, first: int, second: int) -> None:
        low, high = sorted((self.root(first), self.root(second)))
        self.parent[high] = low
