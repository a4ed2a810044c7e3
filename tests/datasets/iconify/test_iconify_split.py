from __future__ import annotations

from pathlib import Path

from neuclip.datasets.iconify.collections import Collection
from neuclip.datasets.iconify.drawing import Row
from neuclip.datasets.iconify.splitting import Pair, split_by_names
from neuclip.datasets.icons.split import NEW_CONCEPTS, NEW_DRAWINGS, TRAIN

HANDS = ("openmoji", "twemoji", "noto", "tabler")
CONCEPTS = frozenset(["tiger"])


def pair(prefix: str, name: str, caption: str) -> Pair:
    collection = Collection(prefix, prefix, "", "", "MIT", "", False, 0, Path(f"{prefix}.json"))
    return Pair(collection, Row(name, (caption,), ""), (0, 0))


def split(pairs):
    return {one.id: part for one, part in zip(pairs, split_by_names(pairs, CONCEPTS), strict=True)}


def test_of_a_tested_drawing_one_style_is_shown_and_none_is_trained_on():
    names = [f"thing {number}" for number in range(40)]
    parts = split([pair(hand, f"{name}-{style}", name) for hand in HANDS for name in names for style in "abc"])
    held = 0
    for name in names:
        of_hand = {hand: [parts[f"{hand}/{name}-{style}"] for style in "abc"] for hand in HANDS}
        tested = [hand for hand, found in of_hand.items() if NEW_DRAWINGS in found]
        held += len(tested)
        for hand, found in of_hand.items():
            expected = [NEW_DRAWINGS, "none", "none"] if hand in tested else [TRAIN] * 3
            assert sorted(part or "none" for part in found) == sorted(expected)
        assert len(tested) <= 1
    assert 10 <= held <= 30, "half of the captions give one hand away"


def test_held_out_words_are_never_trained_on():
    parts = split(
        [pair(hand, f"{name}-{style}", name) for hand in HANDS for name in ("tigers", "cub") for style in "ab"]
    )
    for hand in HANDS:
        found = [parts[f"{hand}/tigers-{style}"] for style in "ab"]
        assert sorted(part or "none" for part in found) == [NEW_CONCEPTS, "none"]


def test_all_skin_tones_of_an_emoji_go_where_the_emoji_goes():
    tones = ("", " light skin tone", " dark skin tone")
    names = [f"gesture {number}" for number in range(30)]
    parts = split([pair(hand, name + tone, name + tone) for hand in HANDS for name in names for tone in tones])
    for hand in HANDS:
        for name in names:
            found = {parts[f"{hand}/{name}{tone}"] for tone in tones}
            assert found in ({TRAIN}, {NEW_DRAWINGS, None})
    assert NEW_DRAWINGS in parts.values()


def test_two_styles_of_one_origin_are_one_hand():
    parts = split([pair(prefix, "anchor", "anchor") for prefix in ("mdi", "ic", "material-symbols")])
    assert set(parts.values()) == {TRAIN}, "nobody else draws it, so holding it out would leave nothing to learn from"
