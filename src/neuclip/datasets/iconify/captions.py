"""From an icon's name to its caption: the words of the name, without those that only tell its style.

The style is kept in the JSON: in a caption it would let a model tell images apart without looking at what they show.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property

from neuclip.datasets.captions import emoji_caption, words_of
from neuclip.datasets.emoji import read_emoji_table

ALWAYS_STYLE = ("outline", "outlined", "filled", "fill", "solid", "duotone", "twotone", "two-tone")
# Words that may mean something (`traffic-light`, `text-bold`, `chart-line`): they are style only where the collection
# has the same name without them, or with another style in their place. Most collections list theirs; these do not.
STYLE_WITH_SIBLING = ("alt", "variant")
UNLISTED_STYLES = {
    "clarity": ("line",),
    "codicon": ("compact",),
    "dinkie-icons": ("small",),
    "fa": ("o",),
    "garden": ("stroke",),
    "gg": ("o", "r"),
    "gis": ("o",),
    "icon-park": ("one", "two", "three", "four", "five", "six"),
    "icon-park-outline": ("one", "two", "three", "four", "five", "six"),
    "icon-park-solid": ("one", "two", "three", "four", "five", "six"),
    "icon-park-twotone": ("one", "two", "three", "four", "five", "six"),
    "jam": ("f",),
    "lets-icons": ("light", "line", "duotone-line"),
    "majesticons": ("line",),
    "material-icon-theme": ("light",),
    "nrk": ("active", "expressive"),
    "pixelarticons": ("sharp",),
    "skill-icons": ("dark", "light"),
    "stash": ("light",),
    "uiw": ("o",),
    "vaadin": ("o",),
}
SERIAL_NUMBER = re.compile(r"0\d|\d\d-?px")  # `home-01`: the first of several; nothing that is seen
OSMIC_SIZE = re.compile(r"(.+)-(1\d)")
FLAG_SETS = ("flag", "circle-flags", "flagpack", "cif")  # their names are codes of countries
UNICODE_SETS = ("openmoji", "twemoji", "noto", "noto-v1", "emojione", "emojione-monotone", "emojione-v1")
TONES = ("medium-light", "medium-dark", "light", "medium", "dark")  # longer ones first
SHORT_TONE_SETS = ("fluent-emoji", "fluent-emoji-flat", "fluent-emoji-high-contrast")
REGIONAL_A = 0x1F1E6  # flags of countries are written as two letters of this alphabet


@dataclass(frozen=True)
class Naming:
    """How one collection names its icons."""

    prefix: str
    names: Set[str]
    prefixes: Sequence[str] = ()
    suffixes: Sequence[str] = ()

    @property
    def every_name_has_a_suffix(self) -> bool:
        return bool(self.suffixes) and "" not in self.suffixes

    @cached_property
    def styles(self) -> tuple[str, ...]:
        """All endings that may tell a style, longer ones first."""
        styles = {*ALWAYS_STYLE, *STYLE_WITH_SIBLING, *UNLISTED_STYLES.get(self.prefix, ()), *self.suffixes} - {""}
        return tuple(sorted(styles, key=lambda style: (-len(style), style)))


def caption_and_style(name: str, naming: Naming) -> tuple[str, str]:
    """Caption and style of an icon; the caption is "" when the name says nothing.

    >>> caption_and_style("traffic-light-light", Naming("ph", {"traffic-light"}, suffixes=("", "light", "bold")))
    ('traffic light', 'light')
    """
    stem, style = split_style(name, naming)
    if naming.prefix in FLAG_SETS:
        return flag_caption(stem), style
    if naming.prefix in SHORT_TONE_SETS:
        stem = _with_whole_tone(stem, naming.names)
    caption = " ".join(re.split(r"[-_\s]+", stem.lower()))
    if naming.prefix in UNICODE_SETS:
        caption = re.sub(r"^flag (?:for )?(?:flag )?", "flag of ", caption)
    return ("" if caption.replace(" ", "").isdigit() else caption), style


def further_captions(caption: str, aliases: Sequence[str], naming: Naming) -> list[str]:
    """Captions from aliases, of those that bring a word that is not yet there: `grade` beside `star`.

    Numbers are codes and sizes (`owm-302`, `farm-15`), and so are most words of two letters.
    """
    known, captions = words_of(caption), []
    for alias in aliases:
        other, _ = caption_and_style(alias, naming)
        new = {word for word in words_of(other) - known if len(word) > 2}
        if new and not any(letter.isdigit() for letter in other):
            known |= new
            captions.append(other)
    return captions


def split_style(name: str, naming: Naming) -> tuple[str, str]:
    """The name without its words of style, and these."""
    stem, front, back = name, "", ""
    for prefix in naming.prefixes:
        if prefix and stem.startswith(f"{prefix}-"):
            stem, front = stem[len(prefix) + 1 :], prefix
            break
    if naming.every_name_has_a_suffix:
        listed = [suffix for suffix in naming.suffixes if stem.endswith(f"-{suffix}")]
        if listed:
            back = max(listed, key=len)
            stem = stem[: -len(back) - 1]
    while style := _style_at_end(stem, naming):
        stem, back = stem[: -len(style) - 1], f"{style}-{back}".rstrip("-")
    return stem, " ".join(part for part in (front, back) if part)


def flag_caption(code: str) -> str:
    """
    >>> flag_caption("ad"), flag_caption("gb-wls"), flag_caption("united-nations"), flag_caption("us-tx")
    ('flag of andorra', 'flag of wales', 'flag of united nations', '')
    """
    if code in _countries():
        return _countries()[code]
    words = code.split("-")
    # `us-tx` or `lang-fy` would have to be looked up; `au-torres-strait-islands` says what it is after the code.
    named = [word for word in words if len(word) > 3 and word != "lang"]
    return f"flag of {' '.join(words[words.index(named[0]) :])}" if named else ""


@cache
def _countries() -> dict[str, str]:
    """Code to caption, for every flag with an emoji, and those of Great Britain's nations."""
    captions = {}
    for emoji in read_emoji_table():
        if emoji.subgroup == "country-flag":
            code = "".join(chr(ord(character) - REGIONAL_A + ord("a")) for character in emoji.characters)
            captions[code] = emoji_caption(emoji.name)
    nations = {"gb-eng": "england", "gb-sct": "scotland", "gb-wls": "wales", "gb-nir": "northern ireland"}
    return captions | {code: f"flag of {nation}" for code, nation in nations.items()}


def _style_at_end(stem: str, naming: Naming) -> str:
    base, _, last = stem.rpartition("-")
    if not base:
        return ""
    if SERIAL_NUMBER.fullmatch(last):
        return last
    if naming.prefix == "osmic" and OSMIC_SIZE.fullmatch(stem):
        return last
    for style in naming.styles:
        if stem.endswith(f"-{style}"):
            base = stem[: -len(style) - 1]
            if style in ALWAYS_STYLE or _has_sibling(base, style, naming):
                return style
    return ""


def _has_sibling(base: str, style: str, naming: Naming) -> bool:
    return base in naming.names or any(f"{base}-{other}" in naming.names for other in naming.styles if other != style)


def _with_whole_tone(stem: str, names: Set[str]) -> str:
    """Fluent's `wave-dark` as other sets write it: `wave-dark-skin-tone`."""
    for tone in TONES:
        base = stem.removesuffix(f"-{tone}")
        if base != stem and base in names:
            return f"{stem}-skin-tone"
    return stem
