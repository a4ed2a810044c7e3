"""Which prototypes a step renews, and from which rows of the batch (Algorithm 1, lines 3-4)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


class RestartSchedule:
    """A ring over the slots.

    *periodic*: one batch cannot fill more slots than it has rows, so a restart with m > B goes on over the following
    steps; slots that are not yet overwritten keep their trained value, and a restart that falls due meanwhile waits.
    *rolling*: each step replaces the oldest slots with its batch, so the prototypes are a queue.
    """

    def __init__(self, num_prototypes: int, restart: Literal["periodic", "rolling"], restart_every: int):
        self.num_prototypes, self.restart, self.restart_every = num_prototypes, restart, restart_every
        self.step = 0
        self.pending = False
        self.remaining = 0
        self.next_slot = 0
        self.active = 0  # slots that were written; they fill from the front

    def advance(self, batch: int) -> tuple[Tensor, Tensor] | None:
        """Take one step: the slots to write and the batch rows to write there, or nothing."""
        self._start_if_due()
        count = min(batch, self.remaining)
        if count == 0:
            return None
        slots = (self.next_slot + torch.arange(count)) % self.num_prototypes
        rows = torch.arange(count) * batch // count  # evenly spaced, so that every rank has its share
        self.remaining -= count
        self.next_slot = (self.next_slot + count) % self.num_prototypes
        self.active = min(self.active + count, self.num_prototypes)
        return slots, rows

    def _start_if_due(self) -> None:
        if self.restart == "rolling":
            due, self.remaining = True, 0
        else:
            due = self.step % self.restart_every == 0 if self.restart_every else self.step == 0
        self.step += 1
        self.pending |= due
        if self.pending and self.remaining == 0:
            self.pending, self.remaining = False, self.num_prototypes

    def state(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in ("step", "pending", "remaining", "next_slot", "active")}

    def load_state(self, state: dict[str, int]) -> None:
        self.step, self.remaining = state["step"], state["remaining"]
        self.next_slot, self.active = state["next_slot"], state["active"]
        self.pending = bool(state["pending"])
