from __future__ import annotations

from pathlib import Path

from neuclip.datasets.iconify.collections import Collection
from neuclip.datasets.iconify.drawing import DrawnIcon
from neuclip.datasets.iconify.splitting import IconifyPair, make_pair, split_by_name
from neuclip.datasets.splitting import NEW_CONCEPTS, NEW_DRAWINGS, TRAIN

FAMILIES = ("openmoji", "twemoji", "noto", "tabler")
HELD_OUT_WORDS = frozenset(["tiger"])


def pair(prefix: str, name: str, caption: str) -> IconifyPair:
    collection = Collection(prefix, prefix, "", "", "MIT", "", False, 0, Path(f"{prefix}.json"))
    return make_pair(collection, DrawnIcon(name, (caption,), ""), (0, 0))


def split(pairs):
    return {one.id: part for one, part in zip(pairs, split_by_name(pairs, HELD_OUT_WORDS), strict=True)}


def test_of_a_tested_drawing_one_style_is_shown_and_none_is_trained_on():
    names = [f"thing {number}" for number in range(40)]
    parts = split([pair(family, f"{name}-{style}", name) for family in FAMILIES for name in names for style in "abc"])
    held = 0
    for name in names:
        of_family = {family: [parts[f"{family}/{name}-{style}"] for style in "abc"] for family in FAMILIES}
        tested = [family for family, found in of_family.items() if NEW_DRAWINGS in found]
        held += len(tested)
        for family, found in of_family.items():
            expected = [NEW_DRAWINGS, "none", "none"] if family in tested else [TRAIN] * 3
            assert sorted(part or "none" for part in found) == sorted(expected)
        assert len(tested) <= 1
    assert 10 <= held <= 30, "half of the captions are held out in one family"


def test_held_out_words_are_never_trained_on():
    parts = split(
        [pair(family, f"{name}-{style}", name) for family in FAMILIES for name in ("tigers", "cub") for style in "ab"]
    )
    for family in FAMILIES:
        found = [parts[f"{family}/tigers-{style}"] for style in "ab"]
        assert sorted(part or "none" for part in found) == [NEW_CONCEPTS, "none"]


def test_all_skin_tones_of_an_emoji_go_where_the_emoji_goes():
    tones = ("", " light skin tone", " dark skin tone")
    names = [f"gesture {number}" for number in range(30)]
    parts = split([pair(family, name + tone, name + tone) for family in FAMILIES for name in names for tone in tones])
    for family in FAMILIES:
        for name in names:
            found = {parts[f"{family}/{name}{tone}"] for tone in tones}
            assert found in ({TRAIN}, {NEW_DRAWINGS, None})
    assert NEW_DRAWINGS in parts.values()


def test_two_styles_of_one_origin_are_one_family():
    parts = split([pair(prefix, "anchor", "anchor") for prefix in ("mdi", "ic", "material-symbols")])
    assert set(parts.values()) == {TRAIN}, "nobody else draws it, so holding it out would leave nothing to learn from"
