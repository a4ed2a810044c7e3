"""One picture of a package with its caption, before it is drawn."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Item:
    """What a package offers: `key` names it for good, `about` goes into the sample's JSON.

    Items of one `series` (drawings of one name by one author) belong to one part of a set.
    """

    key: str
    file: Path
    caption: str
    about: Mapping[str, Any]
    series: str = ""


@dataclass
class Listing:
    """The items of a package in a fixed order, and how many of its pictures are left out, by reason."""

    items: list[Item] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def clean(text: str) -> str:
    """One line in Unicode's composed form, without blanks around it.

    >>> clean("  A  toucan.\\n")
    'A toucan.'
    """
    return unicodedata.normalize("NFC", " ".join(text.split()))
