"""Held-out queries with their first matches, in both directions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import Any

from neuclip.formatting import format_count
from neuclip.report.contents import RunContents, number, only_objects

# Only images that carry themselves: anything else in the file must not make the page reach out.
OWN_PICTURE = re.compile(r"data:image/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+")
NOT_CHOSEN = "The queries are drawn at random with the run's seed, not chosen."


def gallery_section(run: RunContents) -> str:
    """Both directions, or a sentence in their place."""
    images, texts = (queries(run.gallery.get(direction)) for direction in ("image_to_text", "text_to_image"))
    if not images and not texts:
        return '<p class="absence">No queries were kept: they come with the last evaluation, if a set was measured.</p>'
    dataset = str(run.gallery.get("dataset") or "held-out data")
    parts = [f'<p class="lead">From {escape(dataset)}. {NOT_CHOSEN}</p>']
    if images:
        parts.append(f"<h3>Image to text</h3><p>{how_many_right(images, 'captions')}</p>")
        parts.append(f'<ul class="gallery">{"".join(image_query(query) for query in images)}</ul>')
    if texts:
        parts.append(f"<h3>Text to image</h3><p>{how_many_right(texts, 'images')}</p>")
        parts.append(f'<ul class="gallery">{"".join(text_query(query) for query in texts)}</ul>')
    return "".join(parts)


def queries(value: Any) -> list[dict[str, Any]]:
    return only_objects(value) if isinstance(value, list) else []


def matches(query: Mapping[str, Any]) -> list[dict[str, Any]]:
    return queries(query.get("matches"))


def how_many_right(shown: list[dict[str, Any]], answers: str) -> str:
    """'7 of the 12 shown have the right answer first, 10 have it among the captions shown.'"""
    first = sum(any(map(is_right, matches(query)[:1])) for query in shown)
    among = sum(any(map(is_right, matches(query))) for query in shown)
    return f"{first} of the {len(shown)} shown have the right answer first, {among} have it among the {answers} shown."


def image_query(query: Mapping[str, Any]) -> str:
    """An image, its own caption, and the captions found for it."""
    found = "".join(
        f"<li{look(match)}><span>{escape(text(match.get('caption')))}{mark(match)}</span>"
        f'<span class="score">{score(match)}</span></li>'
        for match in matches(query)
    )
    return (
        f'<li class="query"><div class="asked">{image(query.get("image"), "the query")}'
        f'<p><span class="quiet">its own caption</span>{escape(text(query.get("caption")))}</p></div>'
        f'<ol class="captions">{found}</ol>{rank_line(query)}</li>'
    )


def text_query(query: Mapping[str, Any]) -> str:
    """A caption and the images found for it."""
    found = "".join(
        f"<li{look(match)}>{image(match.get('image'), text(match.get('caption')))}"
        f'<span class="below">{mark(match)} {score(match)}</span></li>'
        for match in matches(query)
    )
    asked = escape(text(query.get("caption")))
    return (
        f'<li class="query"><p class="asked-text"><span class="quiet">caption</span>{asked}</p>'
        f'<ol class="images">{found}</ol>{rank_line(query)}</li>'
    )


def is_right(match: Mapping[str, Any]) -> bool:
    return match.get("right") is True


def look(match: Mapping[str, Any]) -> str:
    return ' class="right"' if is_right(match) else ""


def mark(match: Mapping[str, Any]) -> str:
    """A check mark with a word: colour alone would leave some readers out."""
    return '<b class="mark">✓ right</b>' if is_right(match) else ""


def score(match: Mapping[str, Any]) -> str:
    value = number(match.get("score"))
    return "" if value is None else f"{value:.2f}".replace("-", "−")


def rank_line(query: Mapping[str, Any]) -> str:
    rank = number(query.get("rank"))
    if rank is None:
        return '<p class="rank">The rank of the right answer was not recorded.</p>'
    return f'<p class="rank">Right answer at rank <strong>{format_count(rank)}</strong></p>'


def image(source: Any, description: str) -> str:
    if not isinstance(source, str) or not OWN_PICTURE.fullmatch(source):
        return '<span class="thumbnail none">no image</span>'
    words = escape(description)
    return f'<img class="thumbnail" src="{source}" alt="{words}" title="{words}">'


def text(value: Any) -> str:
    return value if isinstance(value, str) and value else "(no caption)"
