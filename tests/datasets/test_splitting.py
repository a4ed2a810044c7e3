from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np

from neuclip.datasets.captions import words_of
from neuclip.datasets.collection import Collection
from neuclip.datasets.drawing import Drawn
from neuclip.datasets.drawn import DrawnCollection, Names, _store
from neuclip.datasets.near_duplicates import thumbnail
from neuclip.datasets.splitting import (
    NEW_CONCEPTS,
    NEW_DRAWINGS,
    TRAIN,
    Concept,
    Pair,
    different_images,
    drop_near_duplicates,
    heldout_concepts,
    show_one_style,
    split_by_concept,
    widely_drawn,
    without_words,
)

FAMILIES = ("openmoji", "twemoji", "noto", "mdi")
CAPTIONS = [f"thing {number}" for number in range(60)] + ["cat", "cats", "grinning cat, sitting", "category", "fire"]
CONCEPTS = [Concept(caption, family) for caption in CAPTIONS for family in FAMILIES]


def collection(name: str, family: str = "") -> Collection:
    return Collection(name=name, family=family or name, licence="MIT", expected=0)


def drawn(name: str, images: np.ndarray, folder: Path) -> DrawnCollection[Collection]:
    """A collection of these images."""
    names = [Names(str(number), ("a drawing",)) for number in range(len(images))]
    stored = [Drawn(b"", sha256(image.tobytes()).digest(), thumbnail(image)) for image in images]
    _store(folder / name, names, stored, {})
    return DrawnCollection(collection(name), folder / name)


def split(pairs: list[Pair[Collection]]) -> dict[str, str | None]:
    parts = show_one_style(pairs, split_by_concept([pair.concept for pair in pairs], {"tiger"}))
    return {pair.id: part for pair, part in zip(pairs, parts, strict=True)}


def pair(family: str, name: str, caption: str) -> Pair[Collection]:
    return Pair(collection(family), Names(name, (caption,)))


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


def test_no_test_image_keeps_a_near_duplicate_in_train_and_train_keeps_all(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, size=(31, 64, 64, 3)).astype(np.uint8)
    images[20:25] = np.clip(images[:5].astype(int) + 3, 0, 255)  # near duplicates of train in the test parts
    collections = [drawn("first", images[:3], tmp_path), drawn("second", images[3:], tmp_path)]
    pairs = different_images(collections)
    assert len(pairs) == 31
    parts = [TRAIN] * 20 + [NEW_DRAWINGS] * 7 + [NEW_CONCEPTS] * 3 + [None]
    kept = drop_near_duplicates(pairs, parts, collections)
    assert kept == [TRAIN] * 20 + [None] * 5 + [NEW_DRAWINGS] * 2 + [NEW_CONCEPTS] * 3 + [None]


def test_keywords_with_held_out_words_are_not_trained_on():
    assert without_words(["cats", "pet", "wild cat", "category"], {"cat"}) == ["pet", "category"]


def test_of_a_tested_drawing_one_style_is_shown_and_none_is_trained_on():
    names = [f"thing {number}" for number in range(40)]
    parts = split([pair(family, f"{name}-{style}", name) for family in FAMILIES for name in names for style in "abc"])
    held = 0
    for name in names:
        of_family = {family: [parts[f"{family}/{name}-{style}"] for style in "abc"] for family in FAMILIES}
        tested = [family for family, styles in of_family.items() if NEW_DRAWINGS in styles]
        held += len(tested)
        for family, styles in of_family.items():
            expected = [NEW_DRAWINGS, "none", "none"] if family in tested else [TRAIN] * 3
            assert sorted(part or "none" for part in styles) == sorted(expected)
        assert len(tested) <= 1
    assert 10 <= held <= 30, "half of the captions are held out in one family"


def test_held_out_words_are_never_trained_on():
    parts = split(
        [pair(family, f"{name}-{style}", name) for family in FAMILIES for name in ("tigers", "cub") for style in "ab"]
    )
    for family in FAMILIES:
        styles = [parts[f"{family}/tigers-{style}"] for style in "ab"]
        assert sorted(part or "none" for part in styles) == [NEW_CONCEPTS, "none"]


def test_all_skin_tones_of_an_emoji_go_where_the_emoji_goes():
    tones = ("", " light skin tone", " dark skin tone")
    names = [f"gesture {number}" for number in range(30)]
    parts = split([pair(family, name + tone, name + tone) for family in FAMILIES for name in names for tone in tones])
    for family in FAMILIES:
        for name in names:
            toned = {parts[f"{family}/{name}{tone}"] for tone in tones}
            assert toned in ({TRAIN}, {NEW_DRAWINGS, None})
    assert NEW_DRAWINGS in parts.values()


def test_two_styles_of_one_origin_are_one_family():
    anchor = Names("anchor", ("anchor",))
    parts = split([Pair(collection(style, "material"), anchor) for style in ("mdi", "ic", "mdi-light")])
    assert set(parts.values()) == {TRAIN}, "nobody else draws it: held out, there would be nothing to learn from"
