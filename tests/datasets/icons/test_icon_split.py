from __future__ import annotations

import numpy as np

from neuclip.datasets.icons.captions import words_of
from neuclip.datasets.icons.near_duplicates import has_near_twin, stack_thumbnails, thumbnail
from neuclip.datasets.icons.split import (
    NEW_CONCEPTS,
    NEW_DRAWINGS,
    TRAIN,
    Named,
    comparable_captions,
    drop_twins_of_train,
    heldout_concepts,
    split_pairs,
    trainable_tags,
)

FAMILIES = ("openmoji", "twemoji", "noto", "mdi")
CAPTIONS = [f"thing {number}" for number in range(60)] + ["cat", "cats", "grinning cat, sitting", "category", "fire"]
PAIRS = [Named(caption, family) for caption in CAPTIONS for family in FAMILIES]


def test_there_are_a_hundred_held_out_words():
    assert len(heldout_concepts()) == 100 and {"cat", "headphones", "wind"} <= heldout_concepts()


def test_every_pair_with_a_held_out_word_goes_to_new_concepts_and_no_other():
    for pair, split in zip(PAIRS, split_pairs(PAIRS, {"cats", "fire"}), strict=True):
        assert (split == NEW_CONCEPTS) == bool(words_of(pair.caption) & {"cat", "fire"})


def test_a_new_drawing_is_held_out_in_all_styles_of_one_family_and_trained_on_in_the_others():
    pairs = PAIRS * 2  # every family draws everything in two styles
    splits = split_pairs(pairs, {"cat"})
    held = {pair for pair, split in zip(pairs, splits, strict=True) if split == NEW_DRAWINGS}
    trained = {pair for pair, split in zip(pairs, splits, strict=True) if split == TRAIN}
    assert held.isdisjoint(trained)
    assert 15 < len(held) == len({pair.caption for pair in held}) < 50
    assert {pair.family for pair in held} == set(FAMILIES), "no family is spared"
    assert {pair.caption for pair in held} <= {pair.caption for pair in trained}


def test_captions_drawn_by_two_families_are_all_trained_on():
    pairs = [pair for pair in PAIRS if pair.family in FAMILIES[:2]]
    assert set(split_pairs(pairs, set())) == {TRAIN}
    assert not comparable_captions(pairs)


def test_the_split_of_a_caption_does_not_depend_on_the_other_captions():
    whole = dict(zip(PAIRS, split_pairs(PAIRS, {"cat"}), strict=True))
    half = PAIRS[: len(PAIRS) // 2]
    assert split_pairs(half, {"cat"}) == [whole[pair] for pair in half]


def test_no_test_image_keeps_a_near_twin_in_train_and_train_keeps_all():
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, size=(30, 64, 64, 3)).astype(np.uint8)
    images[20:25] = np.clip(images[:5].astype(int) + 3, 0, 255)  # twins of train in the test parts
    thumbnails = stack_thumbnails([thumbnail(image) for image in images])
    splits = [TRAIN] * 20 + [NEW_DRAWINGS] * 7 + [NEW_CONCEPTS] * 3
    kept = drop_twins_of_train(splits, thumbnails)
    assert kept[:20] == [TRAIN] * 20
    assert kept[20:25] == [None] * 5
    tested = np.array([split in (NEW_DRAWINGS, NEW_CONCEPTS) for split in kept])
    assert tested.any()
    assert not has_near_twin(thumbnails.rows(tested), thumbnails.rows(np.arange(20))).any()


def test_keywords_with_held_out_words_are_not_trained_on():
    assert trainable_tags(["cats", "pet", "wild cat", "category"], {"cat"}) == ["pet", "category"]
