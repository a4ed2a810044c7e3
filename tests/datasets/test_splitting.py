from __future__ import annotations

import numpy as np

from neuclip.datasets.captions import words_of
from neuclip.datasets.near_duplicates import has_near_duplicate, stack_thumbnails, thumbnail
from neuclip.datasets.splitting import (
    NEW_CONCEPTS,
    NEW_DRAWINGS,
    TRAIN,
    Concept,
    drop_near_duplicates,
    held_out_positions,
    heldout_concepts,
    split_by_concept,
    widely_drawn,
    without_words,
)

FAMILIES = ("openmoji", "twemoji", "noto", "mdi")
CAPTIONS = [f"thing {number}" for number in range(60)] + ["cat", "cats", "grinning cat, sitting", "category", "fire"]
CONCEPTS = [Concept(caption, family) for caption in CAPTIONS for family in FAMILIES]


def test_there_are_a_hundred_held_out_words():
    assert len(heldout_concepts()) == 100 and {"cat", "headphones", "wind"} <= heldout_concepts()


def test_every_caption_with_a_held_out_word_goes_to_new_concepts_and_no_other():
    for concept, split in zip(CONCEPTS, split_by_concept(CONCEPTS, {"cats", "fire"}), strict=True):
        assert (split == NEW_CONCEPTS) == bool(words_of(concept.caption) & {"cat", "fire"})


def test_a_new_drawing_is_held_out_in_all_styles_of_one_family_and_trained_on_in_the_others():
    concepts = CONCEPTS * 2  # every family draws everything in two styles
    splits = split_by_concept(concepts, {"cat"})
    held = {concept for concept, split in zip(concepts, splits, strict=True) if split == NEW_DRAWINGS}
    trained = {concept for concept, split in zip(concepts, splits, strict=True) if split == TRAIN}
    assert held.isdisjoint(trained)
    assert 15 < len(held) == len({concept.caption for concept in held}) < 50
    assert {concept.family for concept in held} == set(FAMILIES), "no family is spared"
    assert {concept.caption for concept in held} <= {concept.caption for concept in trained}


def test_captions_drawn_by_two_families_are_all_trained_on():
    concepts = [concept for concept in CONCEPTS if concept.family in FAMILIES[:2]]
    assert set(split_by_concept(concepts, set())) == {TRAIN}
    assert not widely_drawn(concepts)


def test_the_split_of_a_caption_does_not_depend_on_the_other_captions():
    whole = dict(zip(CONCEPTS, split_by_concept(CONCEPTS, {"cat"}), strict=True))
    half = CONCEPTS[: len(CONCEPTS) // 2]
    assert split_by_concept(half, {"cat"}) == [whole[concept] for concept in half]


def test_no_test_image_keeps_a_near_duplicate_in_train_and_train_keeps_all():
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, size=(31, 64, 64, 3)).astype(np.uint8)
    images[20:25] = np.clip(images[:5].astype(int) + 3, 0, 255)  # near duplicates of train in the test parts
    thumbnails = stack_thumbnails([thumbnail(image) for image in images])
    parts = [TRAIN] * 20 + [NEW_DRAWINGS] * 7 + [NEW_CONCEPTS] * 3 + [None]
    train = [thumbnails.rows(np.arange(3)), thumbnails.rows(np.arange(3, 20))]
    kept = drop_near_duplicates(parts, thumbnails.rows(held_out_positions(parts)), train)
    assert kept == [TRAIN] * 20 + [None] * 5 + [NEW_DRAWINGS] * 2 + [NEW_CONCEPTS] * 3 + [None]
    assert not has_near_duplicate(thumbnails.rows(held_out_positions(kept)), thumbnails.rows(np.arange(20))).any()


def test_keywords_with_held_out_words_are_not_trained_on():
    assert without_words(["cats", "pet", "wild cat", "category"], {"cat"}) == ["pet", "category"]
