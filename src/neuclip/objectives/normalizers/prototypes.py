"""Prototypes: m rows per side that stand in for every candidate of the data set (Eq. 10 and 11)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuclip.objectives.formulas.normalizer import prototype_log_normalizer


class Prototypes(nn.Module):
    """One side's network: its rows, and AdaGrad's sums of their squared gradients.

    Named after the anchor they serve: the prototypes *for images* are made of text features. The cosine inside divides
    by a row's length, so rows are free to grow.
    """

    rows: Tensor  # (m, d)
    sums: Tensor  # (m, d)

    def __init__(self, num_prototypes: int, embed_dim: int, initial_accumulator: float):
        super().__init__()
        self.initial_accumulator = initial_accumulator
        self.register_buffer("rows", torch.zeros(num_prototypes, embed_dim))
        self.register_buffer("sums", torch.full((num_prototypes, embed_dim), initial_accumulator))

    def alpha(self, anchors: Tensor, positive: Tensor, *, active: int, tau: Tensor, eps: float) -> Tensor:  # -> (b,)
        """The predicted log-normalizer of each anchor (b, d), from the first `active` rows."""
        similarity = anchors @ F.normalize(self.rows[:active], dim=1).T
        return prototype_log_normalizer(similarity, positive, tau=tau, eps=eps)

    def write(self, slots: Tensor, features: Tensor, *, reset_sums: bool) -> None:  # (k,), (k, d)
        self.rows[slots] = features
        if reset_sums:
            self.sums[slots] = self.initial_accumulator


class Refill:
    """Which slots a step renews, and from which rows of the batch (Algorithm 1, lines 3-4).

    One batch cannot fill more slots than it has rows, so a restart with m > B goes on over the following steps, in
    ring order; what is not yet overwritten keeps its trained value. A restart that falls due meanwhile waits.
    """

    def __init__(self, num_prototypes: int, restart_every: int):
        self.num_prototypes, self.restart_every = num_prototypes, restart_every
        self.step = 0
        self.pending = False
        self.remaining = 0
        self.next_slot = 0
        self.active = 0  # slots that hold anything; they fill from the front

    def advance(self, batch: int) -> tuple[Tensor, Tensor] | None:
        """Take one step: the slots to write and the batch rows to write there, or nothing."""
        due = self.step % self.restart_every == 0 if self.restart_every else self.step == 0
        self.step += 1
        self.pending |= due
        if self.pending and self.remaining == 0:
            self.pending, self.remaining = False, self.num_prototypes
        count = min(batch, self.remaining)
        if count == 0:
            return None
        slots = (self.next_slot + torch.arange(count)) % self.num_prototypes
        rows = torch.arange(count) * batch // count  # evenly spaced, so that every process has its share
        self.remaining -= count
        self.next_slot = (self.next_slot + count) % self.num_prototypes
        self.active = min(self.active + count, self.num_prototypes)
        return slots, rows

    def state(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in ("step", "pending", "remaining", "next_slot", "active")}

    def load_state(self, state: dict[str, int]) -> None:
        self.step, self.remaining = state["step"], state["remaining"]
        self.next_slot, self.active = state["next_slot"], state["active"]
        self.pending = bool(state["pending"])
