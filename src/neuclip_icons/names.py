"""Makes captions from the names of drawings: the name in lower case, without style words.

Names, groups and keywords of the emoji are in emoji_table.tsv.gz, which scripts/make_emoji_table.py writes. The data
are from Unicode CLDR (Unicode-3.0), by way of emojibase (MIT).
"""

from __future__ import annotations

import gzip
import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

EMOJI_PRESENTATION = "FE0F"  # requests the coloured form; only some vendors write it into file names
SKIN_TONE = re.compile(r" (?:medium light|medium dark|light|medium|dark) skin tone")
PLAIN_QUOTES = str.maketrans({"’": "'", "‘": "'", "“": "", "”": ""})
STYLE_WORDS = frozenset(["outline", "outlined", "filled", "fill", "variant", "alt", "solid"])
STYLE_WORD_SETS = ("mdi", "tabler")  # the sets that write the style into the name of a drawing


@dataclass(frozen=True)
class Emoji:
    """One row of the table."""

    characters: str  # as displayed, with every FE0F of Unicode's spelling: fonts need them to join a sequence
    name: str
    group: str
    subgroup: str
    tags: tuple[str, ...]


@cache
def emoji_table() -> dict[str, Emoji]:
    """All base emoji (no skin tones, no components) by their code points in hex, in Unicode's order."""
    text = gzip.decompress(files("neuclip_icons").joinpath("emoji_table.tsv.gz").read_bytes()).decode("utf-8")
    table = {}
    for line in text.splitlines()[1:]:
        points, name, group, subgroup, tags = line.split("\t")
        characters = "".join(chr(int(point, 16)) for point in points.split("-"))
        table[hex_key(points)] = Emoji(characters, name, group, subgroup, tuple(tags.split("|")) if tags else ())
    return table


def hex_key(code_points: str) -> str:
    """The code points in one spelling for all vendors: upper case, without FE0F.

    >>> hex_key("2764-fe0f-200d-1f525")
    '2764-200D-1F525'
    """
    return "-".join(point for point in code_points.upper().split("-") if point != EMOJI_PRESENTATION)


def emoji_caption(name: str) -> str:
    """The caption of an emoji, from its Unicode name.

    >>> emoji_caption("flag: Côte d’Ivoire"), emoji_caption("man: red hair")
    ("flag of côte d'ivoire", 'man with red hair')
    """
    kind, colon, rest = name.partition(": ")
    if not colon:
        return plain_caption(name)
    # `couple with heart: woman, man` gets a second `with`: acceptable, and keeps the rule simple.
    joined = {"flag": "flag of", "keycap": "keycap"}.get(kind, f"{kind} with")
    return plain_caption(f"{joined} {rest}")


def icon_caption(icon_set: str, stem: str) -> str:
    """The caption of an icon, from the stem of its file; `icon_set` is the source without its style.

    >>> icon_caption("tabler", "mood-happy"), icon_caption("mdi", "account-box-outline")
    ('face happy', 'account box')
    """
    words = plain_caption(re.sub(r"[-_\s]+", " ", stem)).split()
    if icon_set in STYLE_WORD_SETS:
        words = [word for word in words if word not in STYLE_WORDS] or words
    if icon_set == "tabler" and len(words) > 1:
        if words[0] == "mood":
            words[0] = "face"
        elif words[0] == "device":
            del words[0]
    return " ".join(words)


def is_brand(icon_set: str, stem: str) -> bool:
    """Whether the icon is a brand mark. These are skipped: they are trade marks, and their names do not describe what
    is seen."""
    return (icon_set == "tabler" and stem.startswith("brand-")) or (icon_set == "phosphor" and stem.endswith("-logo"))


def plain_caption(text: str) -> str:
    """The text in lower case, with plain quotes and single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).translate(PLAIN_QUOTES).lower().split())


def without_skin_tones(caption: str) -> str:
    """The caption without skin tones.

    >>> without_skin_tones("handshake light skin tone dark skin tone")
    'handshake'
    """
    return SKIN_TONE.sub("", caption)


def words_of(caption: str) -> set[str]:
    """The words of a caption in singular and without punctuation, for comparison with held-out words."""
    return {singular(word) for word in re.findall(r"[^\W_]+", caption.lower())}


def singular(word: str) -> str:
    """The singular of a word, by a simple rule.

    >>> singular("headphones"), singular("dress"), singular("bus")
    ('headphone', 'dress', 'bus')
    """
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
