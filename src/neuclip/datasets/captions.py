"""Captions from names: the bare name in lower case, and the words in it."""

from __future__ import annotations

import re
import unicodedata

SKIN_TONE = re.compile(r" (?:medium light|medium dark|light|medium|dark) skin tone")
PLAIN_QUOTES = str.maketrans({"’": "'", "‘": "'", "“": "", "”": ""})


def emoji_caption(name: str) -> str:
    """The caption of an emoji, from its Unicode name.

    >>> emoji_caption("flag: Côte d’Ivoire"), emoji_caption("man: red hair")
    ("flag of côte d'ivoire", 'man with red hair')
    """
    kind, colon, rest = name.partition(": ")
    if not colon:
        return plain_caption(name)
    if kind == "flag":
        return plain_caption(f"flag of {rest}")
    if kind == "keycap":
        return plain_caption(f"keycap {rest}")
    # `couple with heart: woman, man` holds its own `with`; a second one reads well enough and keeps the rule simple.
    return plain_caption(f"{kind} with {rest}")


def plain_caption(text: str) -> str:
    """In lower case, with plain quotes and single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).translate(PLAIN_QUOTES).lower().split())


def without_skin_tones(caption: str) -> str:
    """
    >>> without_skin_tones("handshake light skin tone dark skin tone")
    'handshake'
    """
    return SKIN_TONE.sub("", caption)


def words_of(caption: str) -> set[str]:
    """The words of a caption in the form in which held-out words are compared: without plural and punctuation."""
    return {singular(word) for word in re.findall(r"[^\W_]+", caption.lower())}


def singular(word: str) -> str:
    """
    >>> singular("headphones"), singular("dress"), singular("bus")
    ('headphone', 'dress', 'bus')
    """
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
