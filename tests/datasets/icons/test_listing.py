from __future__ import annotations

import pytest

from neuclip.datasets.icons.listing import icon_caption, is_brand


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
