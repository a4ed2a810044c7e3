"""Captions from JSON, and how they are cleaned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neuclip.data.captions import captions_from_json, strip_blanks


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
