"""Where the time of a step goes: data, towers, normalizer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Seconds per phase since the last reading. A GPU runs behind the program, so there the borders must wait for it;
    that costs time, and `watching` says in which steps it is worth it. A CPU is watched always."""

    def __init__(self, device: torch.device):
        self.device = device
        self.watching = True
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not (self.watching or self.device.type == "cpu"):
            yield
            return
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    def shares(self) -> dict[str, float]:
        """Share of each phase in the time since the last call, as `data_share` and so on."""
        total = sum(self.seconds.values()) or 1.0
        shares = {f"{name}_share": self.seconds[name] / total for name in ("data", "towers", "normalizer")}
        self.seconds.clear()
        return shares

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()
