"""What drawings are called, and which of them a model is tested on."""

from __future__ import annotations

import io
import math
from hashlib import sha256

import numpy as np
import pytest
from PIL import Image

from neuclip_icons import split
from neuclip_icons.drawing import Drawn, encode_png
from neuclip_icons.names import emoji_caption, emoji_table, hex_key, icon_caption, is_brand, words_of
from neuclip_icons.sources import SOURCES
from neuclip_icons.split import (
    NEW_CONCEPTS,
    NEW_DRAWINGS,
    TRAIN,
    Concept,
    Icon,
    heldout_words,
    near_duplicates,
    split_by_concept,
    unique,
    widely_drawn,
)

FAMILIES = ("openmoji", "twemoji", "noto", "mdi")
CAPTIONS = [f"thing {number}" for number in range(60)] + ["cat", "cats", "grinning cat, sitting", "category", "fire"]
CONCEPTS = [Concept(caption, family) for caption in CAPTIONS for family in FAMILIES]


@pytest.mark.parametrize(
    ("name", "caption"),
    [
        ("grinning face", "grinning face"),
        ("flag: Côte d’Ivoire", "flag of côte d'ivoire"),
        ("keycap: #", "keycap #"),
        ("man: red hair", "man with red hair"),
        ("Japanese “here” button", "japanese here button"),
        ("pin\u0303ata", "piñata"),
        (("mdi", "account-box-outline"), "account box"),
        (("mdi", "outline"), "outline"),  # nothing would be left
        (("tabler", "mood-happy"), "face happy"),
        (("tabler", "device-gamepad-2"), "gamepad 2"),
        (("phosphor", "paint-brush-alt"), "paint brush alt"),  # style words are dropped in mdi and tabler only
        (("material", "check_circle outline"), "check circle outline"),
        (("fontawesome", "0"), "0"),
    ],
)
def test_an_emoji_is_called_by_its_unicode_name_and_an_icon_by_its_file_name_without_style(name, caption):
    assert (emoji_caption(name) if isinstance(name, str) else icon_caption(*name)) == caption


def test_brand_marks_are_known_by_the_set_they_come_from():
    assert is_brand("tabler", "brand-github") and is_brand("phosphor", "github-logo")
    assert not is_brand("lucide", "github-logo") and not is_brand("tabler", "logout")


def test_the_emoji_table_holds_every_base_emoji_once_and_no_skin_tone():
    rows = emoji_table().values()
    assert len(rows) == 1906 and len({row.group for row in rows}) == 9
    assert not any(0x1F3FB <= ord(character) <= 0x1F3FF for row in rows for character in row.characters)
    assert all(row.name and row.group and row.subgroup for row in rows)
    assert hex_key("2764-fe0f-200d-1f525") == hex_key("2764-200D-1F525") in emoji_table()


def test_words_are_compared_without_plural_and_punctuation():
    assert words_of("Family with man, woman, boys in a dress") >= {"family", "man", "woman", "boy", "dress"}
    assert words_of("cats, bus; gas") == {"cat", "bus", "gas"}


def test_every_caption_with_a_held_out_word_goes_to_new_concepts_and_no_other():
    assert len(heldout_words()) == 100 and {"cat", "headphone", "wind"} <= heldout_words()
    for concept, part in zip(CONCEPTS, split_by_concept(CONCEPTS), strict=True):
        assert (part == NEW_CONCEPTS) == bool(words_of(concept.caption) & {"cat", "fire"})


def test_a_new_drawing_is_held_out_in_all_styles_of_one_family_and_trained_on_in_the_others():
    concepts = CONCEPTS * 2  # every family draws everything in two styles
    parts = split_by_concept(concepts)
    held = {concept for concept, part in zip(concepts, parts, strict=True) if part == NEW_DRAWINGS}
    trained = {concept for concept, part in zip(concepts, parts, strict=True) if part == TRAIN}
    assert held.isdisjoint(trained)
    assert 15 < len(held) == len({concept.caption for concept in held}) < 50
    assert {concept.family for concept in held} == set(FAMILIES), "no family is spared"
    assert {concept.caption for concept in held} <= {concept.caption for concept in trained}


def test_the_split_of_a_caption_does_not_depend_on_the_other_captions():
    whole = dict(zip(CONCEPTS, split_by_concept(CONCEPTS), strict=True))
    half = CONCEPTS[: len(CONCEPTS) // 2]
    assert split_by_concept(half) == [whole[concept] for concept in half]


def test_captions_drawn_by_two_families_are_all_trained_on():
    concepts = [Concept(f"thing {number}", family) for number in range(60) for family in FAMILIES[:2]]
    assert set(split_by_concept(concepts)) == {TRAIN} and not widely_drawn(concepts)


def icon(pixels: np.ndarray, caption: str = "a drawing", name: str = "1F600") -> Icon:
    image = Image.fromarray(pixels)
    grey = 255 - np.asarray(image.convert("L").resize((24, 24), Image.Resampling.BOX))
    return Icon(SOURCES[0], name, caption, Drawn(encode_png(image), sha256(pixels).digest(), grey.tobytes()))


def test_all_skin_tones_of_an_emoji_are_one_concept():
    plain, toned = (icon(np.zeros((64, 64, 3), np.uint8), caption) for caption in ("wave", "wave dark skin tone"))
    assert plain.concept == toned.concept == Concept("wave", "openmoji")


def test_of_equal_images_the_shortest_caption_stays_then_the_first():
    images = {letter: np.full((64, 64, 3), number, np.uint8) for number, letter in enumerate("abc")}
    captions = ["man farmer", "star", "farmer", "moon", "disc", "worker"]
    icons = [icon(images[letter], caption) for letter, caption in zip("abacba", captions, strict=True)]
    assert [one.caption for one in unique(icons)] == ["star", "farmer", "moon"]


def slowly_near(first: Icon, second: Icon) -> bool:
    """The rule again, in plain numbers."""
    a, b = list(first.drawn.grey), list(second.drawn.grey)
    product = sum(x * y for x, y in zip(a, b, strict=True))
    cosine = product / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    pixels = [np.asarray(Image.open(io.BytesIO(one.drawn.png)), np.float64) for one in (first, second)]
    small = [array.reshape(32, 2, 32, 2, 3).mean(axis=(1, 3)) for array in pixels]
    return cosine >= 0.98 and float(np.abs(small[0] - small[1]).mean()) / 255 <= 0.03


def test_near_duplicates_are_those_of_the_double_loop(monkeypatch):
    generator = np.random.default_rng(0)
    base = generator.integers(0, 256, size=(4, 64, 64, 3))

    def noisy(count: int) -> list[Icon]:
        """Noise that grows from image to image, so that some are near duplicates and some just not."""
        noise = generator.normal(size=(count, 64, 64, 3)) * np.linspace(0, 60, count)[:, None, None, None]
        images = base[np.arange(count) % 4] + noise
        return [icon(image) for image in np.clip(images, 0, 255).astype(np.uint8)]

    tested, others = noisy(23), noisy(19)
    expected = {one for one in tested if any(slowly_near(one, other) for other in others)}
    assert 5 < len(expected) < 20
    monkeypatch.setattr(split, "BLOCK", 7)
    assert near_duplicates(tested, others) == expected
    assert near_duplicates(tested, []) == set()


def test_an_equal_shape_in_another_colour_is_no_near_duplicate():
    red, blue = (np.full((64, 64, 3), 255, np.uint8) for _ in range(2))
    red[16:48, 16:48] = (200, 0, 0)
    blue[16:48, 16:48] = (0, 60, 200)
    assert near_duplicates([icon(red)], [icon(blue)]) == set()
    assert len(near_duplicates([icon(red)], [icon(red)])) == 1
