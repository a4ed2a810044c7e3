"""One table of ratios: each row is something of ours beside its peer, measured in turns within one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HEADER = "| what | peer | ours | peer's | ratio (spread) | goal |\n| --- | --- | --- | --- | --- | --- |"


@dataclass(frozen=True)
class Row:
    """Ours and the peer's: functions that answer their seconds or bytes, or take the time that counts."""

    what: str
    peer: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    goal: float  # of ours / theirs, at most
    in_bytes: bool = False


def cost(action: Callable[[], Any]) -> float:
    """What the action measured itself, or the processor time that it took."""
    start = time.process_time()
    own = action()
    return own if isinstance(own, float) else time.process_time() - start


def measure(row: Row, rounds: int) -> str:
    """The best of several rounds, as a line of the table; a busy machine hurts both sides alike.

    The spread is the smallest and largest ratio of a round: where it is wide, the machine was not free.
    """
    costs = [(cost(row.ours), cost(row.theirs)) for _ in range(rounds)]
    ours, theirs = (min(side) for side in zip(*costs, strict=True))
    ratios = [own / other if other else math.inf for own, other in costs]
    ratio = ours / theirs if theirs else math.inf
    shown = [f"{value / 1e9:.2f} GB" if row.in_bytes else f"{value * 1e3:,.0f} ms" for value in (ours, theirs)]
    verdict = "" if ratio <= row.goal else " MISSED"
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if rounds > 1 else ""
    return f"| {row.what} | {row.peer} | {shown[0]} | {shown[1]} | {ratio:.2f}x{spread} | {row.goal:.2f}x{verdict} |"
