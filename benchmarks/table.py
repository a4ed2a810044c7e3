"""A table of ratios. Each row compares something of ours with a peer; both are measured in turns within one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HEADER = "| what | peer | ours | peer's | ratio (spread) | goal |\n| --- | --- | --- | --- | --- | --- |"


@dataclass(frozen=True)
class Row:
    """A comparison. `ours` and `theirs` are functions that return their cost in seconds or bytes as a float; if they
    return something else, their processor time is the cost."""

    what: str
    peer: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    goal: float  # of ours / theirs, at most
    in_bytes: bool = False


def cost(action: Callable[[], Any]) -> float:
    """The cost that the action returns, or its processor time if it returns none."""
    start = time.process_time()
    returned = action()
    return returned if isinstance(returned, float) else time.process_time() - start


def measure(row: Row, rounds: int) -> str:
    """Measure a row and return it as a line of the table. The best of several rounds counts for each side.

    The spread is the smallest and the largest ratio of a round. If it is wide, the machine was busy.
    """
    costs = [(cost(row.ours), cost(row.theirs)) for _ in range(rounds)]
    ours, theirs = (min(side) for side in zip(*costs, strict=True))
    ratios = [our / their if their else math.inf for our, their in costs]
    ratio = ours / theirs if theirs else math.inf
    shown = [f"{value / 1e9:.2f} GB" if row.in_bytes else f"{value * 1e3:,.0f} ms" for value in (ours, theirs)]
    verdict = "" if ratio <= row.goal else " MISSED"
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if rounds > 1 else ""
    return f"| {row.what} | {row.peer} | {shown[0]} | {shown[1]} | {ratio:.2f}x{spread} | {row.goal:.2f}x{verdict} |"
