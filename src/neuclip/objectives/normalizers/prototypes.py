"""Prototypes: m rows that stand in for every candidate of the data set (Eq. 10 and 11), and how they learn. One side.

They learn from one batch by closed form, without a graph (Algorithm 1, lines 6-8). Each rank holds a block of the
prototypes and all anchors. An update exchanges one number per anchor: its log-sum-exp over the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip.distributed.collectives import gather_values, scatter_sum, world_size
from neuclip.objectives.formulas import add_eps, capped_exponent
from neuclip.objectives.normalizers.row_optimizer import RowOptimizer
from neuclip.objectives.normalizers.sharded import ShardedRows

WARM_TAU = 1 / 40  # exp(40) is 2e17; float32 ends at exp(88)
LOWEST = -1e30  # in place of the maximum of an empty row, where -inf - (-inf) would be not a number


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
        rate_factor: float = 1.0,
    ) -> None:
        """Algorithm 1, lines 6-8, for one side: features and log-normalizers (B,) held constant."""
        rows = self.active_rows(active)
        state = {name: block[: len(rows)] for name, block in self.blocks().items()}
        workspace = Workspace(len(log_normalizer), rows)
        for _ in range(steps):
            gradient = prototype_gradient(rows, anchors, log_normalizer, eps=eps, fit=fit, workspace=workspace)
            self.optimizer.step(rows, gradient, state, rate_factor=rate_factor, scratch=workspace.scratch)

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


@dataclass(frozen=True)
class Anchors:
    """One side of the global batch at one temperature, as its prototypes see it. Made by `anchors_at`."""

    features: Tensor  # (B, d)
    scaled: Tensor  # (B, d) features / tau: what all updates share is computed once
    offset: Tensor  # (B,) -s_ii / tau - log of the number of prototypes, of all ranks, that the mean is over
    tau: Tensor  # scalar
    masked: Tensor | None  # (B, local prototypes) bool: no candidates of this anchor


def anchors_at(
    tau: Tensor, features: Tensor, positive: Tensor, log_count: Tensor, masked: Tensor | None = None
) -> Anchors:  # (), (B, d), (B,), (B,) or ()
    return Anchors(features, features / tau, -positive / tau - log_count, tau, masked)


@dataclass(frozen=True)
class Scores:
    """exp((cos_ij - s_ii) / tau - log m) over this rank's block, as exponentials_ij * exp(shared_i) so that neither
    overflows, and the logarithm of its sum over all ranks."""

    exponentials: Tensor  # (B, local prototypes)
    shared: Tensor  # (B,)
    log_mean: Tensor  # (B,)

    def alpha(self, eps: float) -> Tensor:  # (B,)
        return add_eps(self.log_mean, eps)


def scores(unit: Tensor, anchors: Anchors, buffer: Tensor) -> Scores:  # (m, d), (B, m)
    """Eq. 10 and 11, every block. `buffer` is overwritten and becomes the exponentials."""
    # What an anchor's whole row shares, its positive and the count, needs no pass over (B, m).
    torch.mm(anchors.scaled, unit.T, out=buffer)
    if anchors.masked is not None:
        buffer.masked_fill_(anchors.masked, -torch.inf)
    shared = anchors.offset
    if not _stays_in_range(anchors.tau):
        largest = buffer.amax(dim=1).clamp_(min=LOWEST) if len(unit) else buffer.new_full((len(buffer),), LOWEST)
        buffer.sub_(largest[:, None])
        shared = shared + largest
    total = buffer.exp_().sum(dim=1)
    return Scores(buffer, shared, _over_ranks(shared + total.log()))


def _stays_in_range(tau: Tensor) -> bool:
    """Cosines are between -1 and 1, so at a warm temperature no exponential leaves float32, which saves two passes over
    (B, m). Only on a CPU: reading the temperature of a GPU would wait for it."""
    return tau.device.type == "cpu" and bool(tau >= WARM_TAU)


def _over_ranks(log_mean: Tensor) -> Tensor:  # (B,)
    """Every rank sums the same numbers in the same order: no drift between them."""
    if world_size() == 1:
        return log_mean
    return torch.logsumexp(gather_values(log_mean[None]), dim=0)


def prototype_gradient(
    rows: Tensor,
    anchors: Anchors,
    log_normalizer: Tensor,
    *,
    eps: float,
    fit: Literal["unified", "separate"],
    workspace: Workspace,
) -> Tensor:  # (m, d), (B,) -> (m, d)
    """The gradient of Eq. 12 (or of AmorLIP's squared difference) with respect to one side's prototypes: two matrix
    products and one (B, m) buffer. In the unified objective tau cancels: F has a factor tau, the similarity 1/tau."""
    unit, gradient = workspace.unit, workspace.gradient
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    torch.div(rows, lengths, out=unit)
    score = scores(unit, anchors, workspace.buffer)
    alpha = score.alpha(eps)
    # d/d alpha of exp(L - alpha) + alpha, or of (alpha - L)^2 / 2
    exponent = capped_exponent(log_normalizer, alpha)
    slope = -torch.expm1(exponent) if fit == "unified" else (alpha - log_normalizer) / anchors.tau
    # d alpha_i / d excess_ij = exp(excess_ij - alpha_i). The factor of row i goes to the smaller matrix.
    weight = slope * torch.exp(score.shared - alpha) / len(log_normalizer)
    torch.mm(score.exponentials.T, weight[:, None] * anchors.features, out=gradient)
    # Through the division by the length: the component along a prototype has no effect.
    along = torch.mul(gradient, unit, out=workspace.scratch).sum(dim=1, keepdim=True)
    return gradient.addcmul_(unit, along, value=-1).div_(lengths)


class Workspace:
    """Memory for one side's inner loop, reused by all its updates: fresh pages for (B, m) cost as much as the
    exponentials in them."""

    def __init__(self, batch: int, rows: Tensor):
        self.buffer = rows.new_empty(batch, len(rows))
        self.unit = torch.empty_like(rows)
        self.gradient = torch.empty_like(rows)
        self.scratch = torch.empty_like(rows)
