"""Prototypes: m rows that stand in for every candidate of the data set (Eq. 10 and 11). One side."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip.distributed.collectives import scatter_sum
from neuclip.objectives.normalizers.inner_loop import Anchors, Workspace, prototype_gradient, scores
from neuclip.objectives.normalizers.row_updates import adagrad_update, adam_update, sgd_update
from neuclip.objectives.normalizers.sharded import ShardedRows

RowOptimizer = Literal["adagrad", "adam", "sgd"]


class Prototypes(ShardedRows):
    """One side's network: this process's block of rows, and what their optimizer remembers of each.

    Named after the anchor they serve: the prototypes *for images* are made of text features. The cosine inside divides
    by a row's length, so rows are free to grow.
    """

    rows: Tensor  # (my share of m, d)

    def __init__(
        self,
        num_prototypes: int,
        embed_dim: int,
        *,
        optimizer: RowOptimizer,
        learning_rate: float,
        weight_decay: float,
        initial_accumulator: float,
    ):
        super().__init__(num_prototypes)
        self.optimizer, self.learning_rate, self.weight_decay = optimizer, learning_rate, weight_decay
        self.initial_accumulator = initial_accumulator
        self.add_rows("rows", embed_dim)
        if optimizer == "adagrad":
            self.add_rows("sums", embed_dim, fill=float(initial_accumulator))
        elif optimizer == "adam":
            self.add_rows("first", embed_dim)
            self.add_rows("second", embed_dim)
            self.add_rows("steps", 1)

    def active_rows(self, active: int) -> Tensor:
        """Of the slots that hold anything, this process's: a view."""
        return self.rows[: max(0, active - self.share.start)]

    def write(self, slots: Tensor, features: Tensor, *, reset: bool) -> None:  # (k,), (k, d)
        """Overwrite `slots`; with `reset` their optimizer forgets them."""
        self.rows[slots] = features
        if reset and self.optimizer == "adagrad":
            self.blocks()["sums"][slots] = self.initial_accumulator
        elif reset and self.optimizer == "adam":
            for name in ("first", "second", "steps"):
                self.blocks()[name][slots] = 0

    @torch.no_grad()
    def learn(
        self,
        anchors: Anchors,
        log_normalizer: Tensor,
        *,
        steps: int,
        active: int,
        eps: float,
        fit: Literal["unified", "separate"],
    ) -> None:
        """Algorithm 1, lines 6-8, for one side: features and log-normalizers (B,) held constant."""
        rows = self.active_rows(active)
        workspace = Workspace(len(log_normalizer), rows)
        for _ in range(steps):
            gradient = prototype_gradient(rows, anchors, log_normalizer, eps=eps, fit=fit, workspace=workspace)
            self._update(rows, gradient, scratch=workspace.scratch)

    def _update(self, rows: Tensor, gradient: Tensor, scratch: Tensor) -> None:
        rate, state = self.learning_rate, {name: block[: len(rows)] for name, block in self.blocks().items()}
        if self.weight_decay and self.optimizer == "adam":  # decoupled, as AdamW's
            rows.mul_(1 - rate * self.weight_decay)
        elif self.weight_decay:
            gradient.add_(rows, alpha=self.weight_decay)
        if self.optimizer == "adagrad":
            adagrad_update(rows, state["sums"], gradient, learning_rate=rate)
        elif self.optimizer == "adam":
            moments = (state["first"], state["second"], state["steps"])
            adam_update(rows, *moments, gradient, scratch, learning_rate=rate)
        else:
            sgd_update(rows, gradient, learning_rate=rate)

    @torch.no_grad()
    def alpha(self, anchors: Anchors, *, active: int, eps: float) -> Tensor:  # (B,)
        """The predicted log-normalizer of every anchor."""
        unit = F.normalize(self.active_rows(active), dim=1)
        return scores(unit, anchors, unit.new_empty(len(anchors.features), len(unit))).alpha(eps)

    @torch.no_grad()
    def alpha_with_slope(
        self, anchors: Anchors, *, active: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:  # (B,), (B,), (b, d)
        """`alpha`; how far each depends on the prototypes at all (1 where eps is negligible); and for this process's
        anchors the mean prototype under their softmax, which is tau times the gradient in the anchor's feature."""
        unit = F.normalize(self.active_rows(active), dim=1)
        found = scores(unit, anchors, unit.new_empty(len(anchors.features), len(unit)))
        alpha = found.alpha(eps)
        pulled = found.exponentials.mul_(torch.exp(found.shared - alpha)[:, None]) @ unit
        return alpha, torch.exp(found.log_mean - alpha), scatter_sum(pulled)
