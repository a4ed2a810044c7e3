"""log g of every anchor, over the batch instead of the data set (Eq. 9), with its gradient, in strips of rows: memory
grows with B, not with its square.

For anchors x_i with temperatures tau_i, candidates y_j and similarities s_ij = x_i . y_j:

    l_i     = log sum_j exp(s_ij / tau_i)           over the N_i negatives of anchor i
    log g_i = l_i - s_ii / tau_i - log N_i
    p_ij    = exp(s_ij / tau_i - l_i)               0 for candidates that are no negatives

    d log g_i / d x_i = (sum_j p_ij y_j - y_i) / tau_i           row i as an anchor
    d log g_i / d y_j = p_ij x_i / tau_i, and -x_i / tau_i for j = i          row j as a candidate of anchor i
    d log g_i / d(1/tau_i) = sum_j p_ij s_ij - s_ii

A row is an anchor of one side and a candidate of the other. Both gradients use the same strip of similarities: as an
anchor with its own tau, l and incoming gradient, as a candidate with those of all anchors, three gathered numbers each.
Therefore the backward pass sends three numbers per anchor instead of its features, and computes one matrix product per
side instead of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuclip.objectives.pairs import LOWEST, Pairs, gather_sides


@dataclass(frozen=True)
class Contrast:
    """The result for each anchor of this rank."""

    log_g: Tensor  # (2, b) with graph; -inf without negatives
    mean_excess: Tensor  # (2, b) sum_j p_ij s_ij - s_ii
    accuracy: Tensor  # scalar: the share of images whose own text is the nearest in the batch


def contrast(pairs: Pairs, tau: Tensor) -> Contrast:
    """log g of this rank's anchors, over the global batch. `tau` is a scalar, or one temperature per anchor (2, b).

    The mean over ranks of the gradients is the gradient of the mean over ranks.
    """
    inverse = (1 / tau).expand(2, len(pairs.positive))
    log_g, mean_excess, nearest = LogG.apply(pairs.features, inverse, pairs)
    accuracy = (nearest[0] <= pairs.positive.detach()).to(log_g.dtype).mean()
    return Contrast(log_g, mean_excess, accuracy)


class LogG(torch.autograd.Function):
    """log g with its gradient; also mean_excess and the largest similarity of each anchor, without gradient."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, inverse: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
        log_sum, mean, nearest = features.new_empty(3, *inverse.shape)
        for rows, similarity in pairs.strips():
            peak = torch.amax(similarity, dim=2, out=nearest[:, rows])
            weight = (similarity - peak[..., None]).mul_(inverse[:, rows, None]).exp_()
            total = torch.sum(weight, dim=2, out=log_sum[:, rows])
            torch.linalg.vecdot(weight, similarity, out=mean[:, rows]).div_(total)
        no_negatives = nearest == LOWEST  # then g = 0
        log_sum.log_().addcmul_(nearest, inverse).masked_fill_(no_negatives, 0.0)
        mean_excess = mean.sub_(pairs.positive).masked_fill_(no_negatives, 0.0)
        log_g = log_sum - pairs.positive * inverse - pairs.negatives.log()
        ctx.pairs = pairs
        ctx.save_for_backward(inverse, log_sum, mean_excess)
        ctx.mark_non_differentiable(mean_excess, nearest)
        return log_g.masked_fill_(no_negatives, -torch.inf), mean_excess, nearest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        pairs, (inverse, log_sum, mean_excess) = ctx.pairs, ctx.saved_tensors
        # (3, 2, b) and (3, 2, B): factor, scale and offset of each row as an anchor, and of the other side's anchors
        as_anchor = torch.stack([gradient * inverse, inverse, -log_sum])
        of_anchors = gather_sides(as_anchor.movedim(0, 2)).movedim(2, 0).flip(1).contiguous()
        slopes = torch.empty_like(pairs.features)
        for rows, similarity in pairs.strips():
            factor, scale, offset = as_anchor[:, :, rows, None]
            slope = torch.addcmul(offset, similarity, scale).exp_().mul_(factor)
            factor, scale, offset = of_anchors[:, :, None]
            slope.addcmul_(torch.addcmul(offset, similarity, scale).exp_(), factor)
            for side in (0, 1):
                torch.mm(slope[side], pairs.all_features[1 - side], out=slopes[side, rows])
        for side in (0, 1):  # the part of the positive pair, a row being its anchor and its candidate
            slopes[side].addcmul_(as_anchor[0].sum(dim=0)[:, None], pairs.features[1 - side], value=-1)
        pairs.forget()
        return slopes, gradient * mean_excess, None
