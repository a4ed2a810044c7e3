from __future__ import annotations

import pytest

from neuclip.datasets.captions import emoji_caption, singular, words_of


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


def test_words_are_compared_without_plural_and_punctuation():
    assert words_of("Family with man, woman, boys") == {"family", "with", "man", "woman", "boy"}
    assert [singular(word) for word in ("cats", "dress", "bus", "gas")] == ["cat", "dress", "bus", "gas"]
