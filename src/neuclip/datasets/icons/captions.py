"""From a Unicode name or a file name to a caption: the bare name in lower case, without words for the style.

Words such as `emoji` or `outline` would let a model tell images apart by their style; the style stays in the JSON.
"""

from __future__ import annotations

import re
import unicodedata

STYLE_WORDS = frozenset(["outline", "outlined", "filled", "fill", "variant", "alt", "solid"])
STYLE_WORD_SETS = ("mdi", "tabler")  # the sets that write the style into the name of a drawing
PLAIN_QUOTES = str.maketrans({"’": "'", "‘": "'", "“": "", "”": ""})


def emoji_caption(name: str) -> str:
    """The caption of an emoji, from its Unicode name.

    >>> emoji_caption("flag: Côte d’Ivoire"), emoji_caption("man: red hair")
    ("flag of côte d'ivoire", 'man with red hair')
    """
    kind, colon, rest = name.partition(": ")
    if not colon:
        return _plain(name)
    if kind == "flag":
        return _plain(f"flag of {rest}")
    if kind == "keycap":
        return _plain(f"keycap {rest}")
    # `couple with heart: woman, man` holds its own `with`; a second one reads well enough and keeps the rule simple.
    return _plain(f"{kind} with {rest}")


def icon_caption(icon_set: str, stem: str) -> str:
    """The caption of an icon, from the stem of its file; `icon_set` is the source without its style.

    >>> icon_caption("tabler", "mood-happy"), icon_caption("mdi", "account-box-outline")
    ('face happy', 'account box')
    """
    words = _plain(re.sub(r"[-_\s]+", " ", stem)).split()
    if icon_set in STYLE_WORD_SETS:
        words = [word for word in words if word not in STYLE_WORDS] or words
    if icon_set == "tabler" and len(words) > 1:
        if words[0] == "mood":
            words[0] = "face"
        elif words[0] == "device":
            words = words[1:]
    return " ".join(words)


def is_brand(icon_set: str, stem: str) -> bool:
    """Brand marks are left out: they are trade marks, and their names describe nothing that is seen."""
    return (icon_set == "tabler" and stem.startswith("brand-")) or (icon_set == "phosphor" and stem.endswith("-logo"))


def words_of(caption: str) -> set[str]:
    """The words of a caption in the form in which held-out words are compared: without plural and punctuation."""
    return {singular(word) for word in re.findall(r"[^\W_]+", caption.lower())}


def singular(word: str) -> str:
    """
    >>> singular("headphones"), singular("dress"), singular("bus")
    ('headphone', 'dress', 'bus')
    """
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).translate(PLAIN_QUOTES).lower().split())
