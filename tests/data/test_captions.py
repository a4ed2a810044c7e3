"""Captions from JSON, and how they are cleaned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from neuclip.data.captions import CaptionCounts, Captions, captions_from_json, strip_blanks


def test_captions_come_from_any_json_key():
    raw = b'{"caption": "a", "alt": ["b", null, "c"], "odd,name": "d"}'
    assert captions_from_json(raw) == ("a",)
    assert captions_from_json(raw, "alt") == ("b", "c")
    assert captions_from_json(raw, "alt,caption") == ("b", "c", "a")
    assert captions_from_json(raw, "odd,name") == ("d",)
    assert captions_from_json(raw, "none") == captions_from_json(b"[1]") == captions_from_json(b"{") == ()


@given(st.text(alphabet="a \0\t\n\u3000\x1f\x85", max_size=8))
def test_stripping_twice_is_stripping_once(text):
    once = strip_blanks(text)
    assert strip_blanks(once) == once == once.strip() and not once.startswith("\0")


@given(st.lists(st.lists(st.sampled_from(["a", " ", "b c"]), max_size=4), max_size=8), st.integers(0, 8))
def test_captions_are_counted_as_they_are_used_in_whatever_pieces(captions, cut):
    usable = [[text for text in texts if text.strip()] for texts in captions]
    numbers = [len(texts) for texts in usable]
    some = [number for number in numbers if number]
    pieces = [CaptionCounts.of(Captions.of(piece)) for piece in (captions[:cut], captions[cut:])]
    expected = (len(captions), sum(some), min(some, default=0), max(some, default=0), numbers.count(0))
    assert pieces[0].plus(pieces[1]) == expected


def test_counts_are_told_in_words():
    for captions, words in (
        ([["a"]] * 1200, "1,200 samples, 1 caption each"),
        ([["a"]], "1 sample, 1 caption each"),
        ([["a", "b"]] * 3, "3 samples with 6 captions (2 each)"),
        ([["a", "b"], ["c"], []], "3 samples with 3 captions (1 to 2 each); 1 without"),
        ([["a"], []], "2 samples, 1 caption each; 1 without"),
        ([[], []], "2 samples without captions"),
    ):
        assert str(CaptionCounts.of(Captions.of(captions))) == words
