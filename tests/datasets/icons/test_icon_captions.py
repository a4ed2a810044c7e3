from __future__ import annotations

import pytest

from neuclip.datasets.icons.captions import emoji_caption, icon_caption, is_brand, singular, words_of
from neuclip.datasets.icons.emoji_table import hex_key, read_emoji_table


@pytest.mark.parametrize(
    ("name", "caption"),
    [
        ("grinning face", "grinning face"),
        ("flag: Côte d’Ivoire", "flag of côte d'ivoire"),
        ("flag: St. Kitts & Nevis", "flag of st. kitts & nevis"),
        ("keycap: #", "keycap #"),
        ("keycap: 10", "keycap 10"),
        ("man: red hair", "man with red hair"),
        ("family: man, woman, boy", "family with man, woman, boy"),
        ("Japanese “here” button", "japanese here button"),
        ("pin\u0303ata", "piñata"),
    ],
)
def test_an_emoji_is_called_by_its_unicode_name(name, caption):
    assert emoji_caption(name) == caption


@pytest.mark.parametrize(
    ("icon_set", "stem", "caption"),
    [
        ("mdi", "account-box-outline", "account box"),
        ("mdi", "format-color-fill", "format color"),
        ("mdi", "outline", "outline"),  # nothing would be left
        ("tabler", "mood-happy", "face happy"),
        ("tabler", "device-gamepad-2", "gamepad 2"),
        ("tabler", "circle-filled", "circle"),
        ("phosphor", "paint-brush-alt", "paint brush alt"),  # style words are dropped in mdi and tabler only
        ("material", "check_circle outline", "check circle outline"),
        ("lucide", "a-arrow-down", "a arrow down"),
        ("fontawesome", "0", "0"),
    ],
)
def test_an_icon_is_called_by_its_file_name_without_style(icon_set, stem, caption):
    assert icon_caption(icon_set, stem) == caption


def test_brand_marks_are_known_by_the_set_they_come_from():
    assert is_brand("tabler", "brand-github") and is_brand("phosphor", "github-logo")
    assert not is_brand("lucide", "github-logo") and not is_brand("tabler", "logout")


def test_words_are_compared_without_plural_and_punctuation():
    assert words_of("Family with man, woman, boys") == {"family", "with", "man", "woman", "boy"}
    assert [singular(word) for word in ("cats", "dress", "bus", "gas")] == ["cat", "dress", "bus", "gas"]


def test_the_emoji_table_holds_every_base_emoji_once_and_no_skin_tone():
    table = read_emoji_table()
    assert len(table) == len({row.hex for row in table}) == 1906
    assert len({row.group for row in table}) == 9
    assert not any(0x1F3FB <= ord(character) <= 0x1F3FF for row in table for character in row.characters)
    assert all(row.name and row.group and row.subgroup for row in table)


def test_hex_keys_do_not_depend_on_the_vendors_spelling():
    assert hex_key("2764-fe0f-200d-1f525") == hex_key("2764-200D-1F525") == "2764-200D-1F525"
