"""Held-out queries with their first matches, in both directions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuclip.report.contents import RunContents, dicts_in, number

# Only images that the file itself holds: the page must not fetch anything.
EMBEDDED_IMAGE = re.compile(r"data:image/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+")


@dataclass(frozen=True)
class Match:
    caption: str
    image: str  # empty where there is none to show
    score: float | None
    right: bool


@dataclass(frozen=True)
class Query:
    caption: str
    image: str
    rank: float | None  # of the right answer
    matches: list[Match]


@dataclass(frozen=True)
class Direction:
    """The queries of one direction of retrieval; `answers` says what their matches are."""

    title: str
    answers: str
    queries: list[Query]

    @property
    def how_many_right(self) -> str:
        """'7 of the 12 shown have the right answer first, 10 have it among the captions shown.'"""
        first = sum(any(match.right for match in query.matches[:1]) for query in self.queries)
        among = sum(any(match.right for match in query.matches) for query in self.queries)
        return (
            f"{first} of the {len(self.queries)} shown have the right answer first, "
            f"{among} have it among the {self.answers} shown."
        )


def read_gallery(run: RunContents) -> list[Direction]:
    """The directions that have queries."""
    titles = {"image_to_text": ("Image to text", "captions"), "text_to_image": ("Text to image", "images")}
    directions = [
        Direction(title, answers, [read_query(query) for query in dicts_in(run.gallery.get(key))])
        for key, (title, answers) in titles.items()
    ]
    return [direction for direction in directions if direction.queries]


def read_query(query: Mapping[str, Any]) -> Query:
    matches = [
        Match(caption(match), image(match), number(match.get("score")), match.get("right") is True)
        for match in dicts_in(query.get("matches"))
    ]
    return Query(caption(query), image(query), number(query.get("rank")), matches)


def caption(item: Mapping[str, Any]) -> str:
    text = item.get("caption")
    return text if isinstance(text, str) and text else "(no caption)"


def image(item: Mapping[str, Any]) -> str:
    source = item.get("image")
    return source if isinstance(source, str) and EMBEDDED_IMAGE.fullmatch(source) else ""
