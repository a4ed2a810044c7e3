from __future__ import annotations

import math

import numpy as np

from neuclip.datasets import near_duplicates
from neuclip.datasets.near_duplicates import (
    Thumbnails,
    has_near_duplicate,
    stack_thumbnails,
    thumbnail,
    unique_images,
)


def reference_near_duplicates(grey_a, grey_b, colour_a, colour_b) -> bool:
    product = sum(x * y for x, y in zip(grey_a, grey_b, strict=True))
    cosine = product / math.sqrt(sum(x * x for x in grey_a) * sum(y * y for y in grey_b))
    difference = sum(abs(x - y) / 255 for x, y in zip(colour_a, colour_b, strict=True)) / len(colour_a)
    return cosine >= 0.98 and difference <= 0.03


def noisy_thumbnails(seed: int, count: int, base: np.ndarray) -> Thumbnails:
    """Rows of `base` with noise that grows from row to row, so that some are near duplicates and some just not."""
    generator = np.random.default_rng(seed)
    strength = np.linspace(1, 60, count)[:, None]
    rows = base[generator.integers(len(base), size=count)]
    noisy = np.clip(rows + generator.normal(size=rows.shape) * strength, 0, 255).astype(np.uint8)
    colour = generator.integers(0, generator.integers(2, 40, size=(count, 1)), size=(count, 30))
    return Thumbnails(noisy, colour.astype(np.uint8))


def test_near_duplicates_are_those_of_the_double_loop(monkeypatch):
    base = np.random.default_rng(0).integers(0, 256, size=(4, 60))
    tested, others = noisy_thumbnails(1, 41, base), noisy_thumbnails(2, 33, base)
    want = [
        any(
            reference_near_duplicates(
                *(row.tolist() for row in (tested.grey[i], others.grey[j], tested.colour[i], others.colour[j]))
            )
            for j in range(33)
        )
        for i in range(41)
    ]
    assert 5 < sum(want) < 36
    monkeypatch.setattr(near_duplicates, "BLOCK_ROWS", 7)
    monkeypatch.setattr(near_duplicates, "BLOCK_PAIRS", 5)
    assert has_near_duplicate(tested, others).tolist() == want


def test_an_equal_shape_in_another_colour_is_no_near_duplicate():
    red, blue = (np.full((64, 64, 3), 255, np.uint8) for _ in range(2))
    red[16:48, 16:48] = (200, 0, 0)
    blue[16:48, 16:48] = (0, 60, 200)
    pair = stack_thumbnails([thumbnail(red), thumbnail(blue)])
    assert has_near_duplicate(pair.rows(np.array([0])), pair.rows(np.array([1]))).tolist() == [False]
    assert has_near_duplicate(pair, pair).tolist() == [True, True]


def test_without_others_nothing_has_a_near_duplicate():
    one = stack_thumbnails([thumbnail(np.zeros((64, 64, 3), np.uint8))])
    assert has_near_duplicate(one, one.rows(np.array([], dtype=int))).tolist() == [False]


def test_of_equal_images_the_shortest_caption_stays_then_the_first():
    digests = [b"a", b"b", b"a", b"c", b"b", b"a"]
    captions = ["man farmer", "star", "farmer", "moon", "disc", "worker"]
    assert unique_images(digests, captions) == [1, 2, 3]
