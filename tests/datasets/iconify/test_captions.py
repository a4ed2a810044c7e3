from __future__ import annotations

import pytest

from neuclip.datasets.captions import without_skin_tones
from neuclip.datasets.iconify.captions import (
    Naming,
    caption_and_style,
    flag_caption,
    further_captions,
)

PHOSPHOR = Naming(
    "ph",
    frozenset(["heart", "heart-light", "heart-bold", "traffic-light", "traffic-light-light", "text-bolder"]),
    suffixes=("", "thin", "light", "bold", "fill", "duotone"),
)
SOLAR = Naming("solar", frozenset(), suffixes=("broken", "linear", "line-duotone", "outline", "bold", "bold-duotone"))
FLUENT = Naming("fluent", frozenset(), suffixes=("20-filled", "24-filled", "24-regular"))
PLAIN = Naming("game-icons", frozenset(["cart", "cart-alt", "battery", "battery-50"]))


@pytest.mark.parametrize(
    ("naming", "name", "expected"),
    [
        (PHOSPHOR, "heart-light", ("heart", "light")),
        (PHOSPHOR, "traffic-light", ("traffic light", "")),
        (PHOSPHOR, "traffic-light-light", ("traffic light", "light")),
        (SOLAR, "shop-2-line-duotone", ("shop 2", "line-duotone")),
        (FLUENT, "skip-forward-30-24-regular", ("skip forward 30", "24-regular")),
        (Naming("ic", frozenset(), prefixes=("baseline", "twotone")), "twotone-add-alarm", ("add alarm", "twotone")),
        (PLAIN, "heart-outline-filled", ("heart", "outline-filled")),
        (PLAIN, "cart-alt", ("cart", "alt")),
        (PLAIN, "battery-50", ("battery 50", "")),
        (PLAIN, "ice-cream-02", ("ice cream", "02")),
        (PLAIN, "outline", ("outline", "")),
        (Naming("osmic", frozenset()), "fire-station-14", ("fire station", "14")),
    ],
)
def test_a_caption_loses_its_words_of_style_and_nothing_else(naming, name, expected):
    assert caption_and_style(name, naming) == expected


@pytest.mark.parametrize("name", ["0", "360", "16-9", "123-filled"])
def test_a_name_of_digits_says_nothing(name):
    assert caption_and_style(name, PLAIN)[0] == ""


def test_skin_tones_are_written_alike_and_belong_to_one_concept():
    fluent = Naming("fluent-emoji-flat", frozenset(["wave", "wave-dark", "wave-medium-light"]))
    assert caption_and_style("wave-medium-light", fluent)[0] == "wave medium light skin tone"
    assert caption_and_style("horizontal-traffic-light", fluent)[0] == "horizontal traffic light"
    captions = [caption_and_style(name, Naming("noto", frozenset()))[0] for name in ("wave", "wave-dark-skin-tone")]
    assert {without_skin_tones(caption) for caption in captions} == {"wave"}


def test_flags_are_called_by_their_country():
    assert flag_caption("fr") == "flag of france"
    assert caption_and_style("gb-sct-4x3", Naming("flag", frozenset(), suffixes=("1x1", "4x3"))) == (
        "flag of scotland",
        "4x3",
    )
    assert caption_and_style("flag-for-flag-peru", Naming("emojione", frozenset()))[0] == "flag of peru"
    assert caption_and_style("flag-peru", Naming("openmoji", frozenset()))[0] == "flag of peru"
    assert caption_and_style("flag-checkered", PLAIN)[0] == "flag checkered"
    assert [flag_caption(code) for code in ("us-tx", "lang-fy", "it-21")] == [""] * 3


def test_an_alias_is_a_caption_only_where_it_brings_a_word():
    aliases = ["bonnet", "bonnet-2", "hat-hard", "hard-hats", "hat-hard-15", "helmet", "hh-hat"]
    assert further_captions("hard hat", aliases, PLAIN) == ["bonnet", "helmet"]
