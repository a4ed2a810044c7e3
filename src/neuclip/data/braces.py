"""Brace patterns: `{00000..00019}.tar` means twenty names, as in bash and in webdataset."""

from __future__ import annotations

import re
from itertools import islice

from braceexpand import braceexpand

from neuclip.data.sample import shortened
from neuclip.errors import UserError
from neuclip.settings.secrets import without_query

MOST_NAMES = 1_000_000  # of one pattern: LAION-5B has 600,000 shards
NUMBERS = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")


def expand_braces(pattern: str) -> list[str]:
    """`a{08..10}.tar` -> a08.tar, a09.tar, a10.tar and `{x,y}.tar` -> x.tar, y.tar; several braces multiply, and those
    that are not closed are letters like others."""
    try:
        # A range is made as a whole before the first name comes, so its length is asked for first.
        ranges = NUMBERS.findall(pattern)
        lengths = [abs(int(last) - int(first)) // (int(step or 1) or 1) for first, last, step in ranges]
        names = [] if max(lengths, default=0) > MOST_NAMES else braceexpand(pattern, escape=False)
        found = list(islice(names, MOST_NAMES + 1))
    except ValueError:
        return [pattern]
    except RecursionError:
        raise UserError(
            f"{shortened(without_query(pattern))}: too many braces inside each other; write the names into a list "
            "(shards.txt), one per line"
        ) from None
    if not 0 < len(found) <= MOST_NAMES:
        raise UserError(
            f"{without_query(pattern)}: means more than {MOST_NAMES:,} files; correct the numbers in its braces"
        )
    return found
