"""Prototypes: m rows that stand in for every candidate of the data set (Eq. 10 and 11). One side."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip.distributed.collectives import scatter_sum
from neuclip.objectives.normalizers.inner_loop import Anchors, Workspace, prototype_gradient, scores
from neuclip.objectives.normalizers.row_optimizer import RowOptimizer
from neuclip.objectives.normalizers.sharded import ShardedRows


class Prototypes(ShardedRows):
    """One side's network: this rank's block of rows, and the optimizer's state of each.

    Named after the anchor they serve: the prototypes *for images* are made of text features. The cosine inside divides
    by a row's length, so rows are free to grow.
    """

    rows: Tensor  # (local share of m, d)

    def __init__(self, num_prototypes: int, embed_dim: int, optimizer: RowOptimizer):
        super().__init__(num_prototypes)
        self.optimizer = optimizer
        self.add_rows("rows", embed_dim)
        for name, (width, initial) in optimizer.state_rows(embed_dim).items():
            self.add_rows(name, width, fill=initial)

    def active_rows(self, active: int) -> Tensor:
        """This rank's part of the slots that were written: a view."""
        return self.rows[: max(0, active - self.share.start)]

    def write(self, slots: Tensor, features: Tensor, *, reset: bool) -> None:  # (k,), (k, d)
        """Overwrite `slots`; with `reset` the optimizer forgets them."""
        self.rows[slots] = features
        if reset:
            self.optimizer.reset(self.blocks(), slots)

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
        state = {name: block[: len(rows)] for name, block in self.blocks().items()}
        workspace = Workspace(len(log_normalizer), rows)
        for _ in range(steps):
            gradient = prototype_gradient(rows, anchors, log_normalizer, eps=eps, fit=fit, workspace=workspace)
            self.optimizer.step(rows, gradient, state, scratch=workspace.scratch)

    @torch.no_grad()
    def alpha(self, anchors: Anchors, *, active: int, eps: float) -> Tensor:  # (B,)
        """The predicted log-normalizer of every anchor."""
        unit = F.normalize(self.active_rows(active), dim=1)
        return scores(unit, anchors, unit.new_empty(len(anchors.features), len(unit))).alpha(eps)

    @torch.no_grad()
    def alpha_with_slope(
        self, anchors: Anchors, *, active: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:  # (B,), (B,), (b, d)
        """`alpha`; how far each depends on the prototypes at all (1 where eps is negligible); and for this rank's
        anchors the mean prototype under their softmax, which is tau times the gradient in the anchor's feature."""
        unit = F.normalize(self.active_rows(active), dim=1)
        score = scores(unit, anchors, unit.new_empty(len(anchors.features), len(unit)))
        alpha = score.alpha(eps)
        mean_prototype = score.exponentials.mul_(torch.exp(score.shared - alpha)[:, None]) @ unit
        return alpha, torch.exp(score.log_mean - alpha), scatter_sum(mean_prototype)
