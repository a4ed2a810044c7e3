"""Addresses without what gives access to the data: the query of a signed URL, and `user:password@`. Neither is ever
shown. All messages, reports and records go through here."""

from __future__ import annotations

import re

QUERY = re.compile(r'(\w+://[^?]*)\?[^"]*')  # up to the end, or to that of a string in JSON
NO_PASSWORD = r"[-+.\d]*(?:[/?:,;{\s\"')]|$)"  # behind a colon: a port, a weight, or the end of an address in a message
# Before the host: all up to the last @ before the slash. With a password that should have been quoted, up to the first
# @ behind its slash, or, if that was cut off with the query, everything.
CREDENTIALS = re.compile(
    rf"(\w+://)(?:[^/?\s,\"']*@|[^/@\s,:\[\"']*:(?!{NO_PASSWORD})(?:[^/\s\"]*@|[^\s\"]*?@|[^/\s\"]*))", re.ASCII
)
HIDDEN = r"\1***@"


def without_query(text: str) -> str:
    """One address, or a message that ends with one, cut at its question mark and with *** for user and password; names
    of local files keep their question marks.

    >>> without_query("https://me:secret@host/a.tar?X-Amz-Signature=abc")
    'https://***@host/a.tar'
    """
    return QUERY.sub(r"\1", CREDENTIALS.sub(HIDDEN, text))


def without_queries(addresses: str) -> str:
    """The same for each of several between commas. User and password go first: a password may hold a comma.

    >>> without_queries("https://host/{a,b}.tar?X-Amz-Signature=abc:2,photos/?.tar")
    'https://host/{a,b}.tar,photos/?.tar'
    """
    return ",".join(map(without_query, between_commas(CREDENTIALS.sub(HIDDEN, addresses))))


def holds_secret(text: str) -> bool:
    """Whether a line of it holds a query, or a user or password, that is not for everybody's eyes."""
    return any(without_query(line) != line for line in text.splitlines())


def between_commas(addresses: str) -> list[str]:
    """Cut at commas outside of braces."""
    pieces, start, depth = [], 0, 0
    for place, letter in enumerate(addresses):
        depth = max(0, depth + (letter == "{") - (letter == "}"))
        if letter == "," and depth == 0:
            pieces.append(addresses[start:place])
            start = place + 1
    return [*pieces, addresses[start:]]
