"""Captions for the drawings of openclipart: what one shows, told from its file name, its title and its tags.

Titles alone do not do: many drawings carry the title of the pack they came in ("Various Cliparts"). File names alone do
not do either: they are cut at 24 letters, and most end in the author's name and a number (`pencil_benji_park_01`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHORTEST_WORD = 3  # a name without a word of that many letters (`fc 07`) says nothing
CAPTION_TAGS = 3
NUMBER = re.compile(r"\d+[a-z]?")  # `01`, `01r`
ODD_SIGNATURES = {"ganson", "md", "r"}  # ends of file names that no author's name explains
PACKS = ("aiga ",)  # a pack's name in front of the drawing's
# Left by the library's own programs, or about the library instead of the drawing.
NO_TAGS = {
    "hash", "unsorted", "special", "miscellany", "openclipart", "clip art", "clipart", "webpage", "icon", "icons",
    "signs and symbols", "united nations member", "mapsym", "networksym", "weathersym", "musicsym", "musicstuff",
    "arrowshape", "appicon", "shape", "sign", "symbol", "symbols", "work", "menu", "svg",
}  # fmt: skip
SUITS = {"c": "clubs", "d": "diamonds", "h": "hearts", "s": "spades"}
RANKS = {"a": "ace", "j": "jack", "q": "queen", "k": "king"}
ADDRESS = re.compile(r"[\[(<]?[^\s(\[<]*(?:mail:\s*)?\S+@[^\s)\]>]+[\])>]?")
CARD = re.compile(r"[a-z]+_([cdhs])_(10|[2-9ajqk])")


@dataclass(frozen=True)
class Metadata:
    """What a document says about itself, as it says it."""

    title: str
    author: str
    tags: tuple[str, ...]
    licence: str


def name_of(stem: str, metadata: Metadata) -> str:
    """What the drawing is called; "" when neither file nor title tells.

    >>> name_of("pencil_benji_park_01", Metadata("Yellow Pencils Pack", "Benji Park", (), ""))
    'pencil'
    >>> name_of("orleans_express_lower_l_", Metadata("Orleans express lower left corner", "", (), ""))
    'orleans express lower left corner'
    """
    if card := CARD.fullmatch(stem):
        return f"{RANKS.get(card[2], card[2])} of {SUITS[card[1]]}"
    words = [word for word in re.split(r"[_\s]+", stem.lower().replace(".svg", "")) if word]
    while words and (NUMBER.fullmatch(words[-1]) or words[-1] in ODD_SIGNATURES):
        words.pop()
    author = _letters(metadata.author)
    if author and author == _letters(metadata.title) and _letters("".join(words)).startswith(author):
        return ""  # title and file name only the author
    if _is_own_title(metadata.title, words, author):
        return _told(metadata.title)
    return _told(" ".join(_without_signature(words, author)))


def useful_tags(metadata: Metadata) -> list[str]:
    """The tags that may tell something, each once."""
    tags = [re.sub(r"[_\s]+", " ", tag).strip().lower() for tag in metadata.tags]
    author = _letters(metadata.author)
    return [
        tag
        for tag in dict.fromkeys(tags)
        if tag not in NO_TAGS
        and not tag.startswith(("hash(", "0x", "http"))
        and _letters(tag) != author
        and _has_word(tag)
    ]


def without_addresses(text: str) -> str:
    """Without the mail addresses that some authors left in titles and names.

    >>> without_addresses("Telefono (email: someone@mail.it)")
    'Telefono'
    """
    return ADDRESS.sub("", text).strip()


def tag_frequency(tags: Iterable[Sequence[str]]) -> Counter[str]:
    """How many drawings bear each tag."""
    return Counter(tag for of_one in tags for tag in of_one)


def caption_of(name: str, tags: Sequence[str], frequency: Counter[str]) -> str:
    """The name and the three commonest of its tags that add a word; "" when there is nothing to say.

    The commonest, because they tell the kind of thing (`flag`, `animal`) in words that other captions use too.

    >>> caption_of("haiti", ["caribbean", "flag"], Counter(flag=455, caribbean=22))
    'haiti, flag, caribbean'
    """
    said = set(_words(name))
    chosen: list[str] = []
    for tag in sorted(tags, key=lambda tag: (-frequency[tag], tag)):
        if len(chosen) < CAPTION_TAGS and not said.issuperset(_words(tag)):
            chosen.append(tag)
            said.update(_words(tag))
    return ", ".join([name, *chosen] if name else chosen)


def _is_own_title(title: str, words: Sequence[str], author: str) -> bool:
    """Whether a file is named after its title: by the title and a signature, or by as much of the title as fits."""
    wanted, found = _letters(title), _letters("".join(words))
    if not _has_word(title) or len(found) < SHORTEST_WORD:
        return False
    return wanted.startswith(found) or (found.startswith(wanted) and _signs(found.removeprefix(wanted), author))


def _without_signature(words: list[str], author: str) -> list[str]:
    """The words before the author's name, the end of which may be cut off."""
    for start in range(len(words)):
        if _signs(_letters("".join(words[start:])), author):
            return words[:start]
    return words


def _signs(letters: str, author: str) -> bool:
    """Whether letters are an author's name or the start of it, perhaps with a number or a letter behind it."""
    letters = re.sub(r"\d+$", "", letters)
    if not letters or letters in ODD_SIGNATURES:
        return True
    return min(len(letters), len(author)) >= SHORTEST_WORD and (
        author.startswith(letters) or letters.startswith(author)
    )


def _told(text: str) -> str:
    """Words between blanks, without a number at the end."""
    text = re.sub(r"(?<=\w)-(?=\w)|[_\s]+", " ", without_addresses(text)).strip().lower()
    for pack in PACKS:
        text = text.removeprefix(pack)
    text = re.sub(r"[\s#.-]*\d*[\s.-]*$", "", text)
    return text if _has_word(text) else ""


def _has_word(text: str) -> bool:
    return any(len(word) >= SHORTEST_WORD for word in re.findall(r"[^\W\d_]+", text))


def _words(text: str) -> list[str]:
    return [word.removesuffix("s") for word in re.findall(r"\w+", text)]


def _letters(text: str) -> str:
    """What file names keep of a title: ASCII letters and digits."""
    return re.sub(r"[^a-z0-9]", "", text.lower())
