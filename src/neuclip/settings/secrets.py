"""Addresses without their queries: the query of a signed URL gives access to the data and is never shown."""

from __future__ import annotations

import re

QUERY = re.compile(r'(\w+://[^?]*)\?[^"]*')  # up to the end, or to that of a string in JSON


def without_query(text: str) -> str:
    """One address, or a message that ends with one, cut at its question mark; names of local files keep theirs."""
    return QUERY.sub(r"\1", text)


def without_queries(addresses: str) -> str:
    """The same for each of several between commas.

    >>> without_queries("https://host/{a,b}.tar?X-Amz-Signature=abc:2,photos/?.tar")
    'https://host/{a,b}.tar,photos/?.tar'
    """
    return ",".join(map(without_query, between_commas(addresses)))


def between_commas(addresses: str) -> list[str]:
    """Cut at commas outside of braces."""
    pieces, start, depth = [], 0, 0
    for place, letter in enumerate(addresses):
        depth = max(0, depth + (letter == "{") - (letter == "}"))
        if letter == "," and depth == 0:
            pieces.append(addresses[start:place])
            start = place + 1
    return [*pieces, addresses[start:]]
