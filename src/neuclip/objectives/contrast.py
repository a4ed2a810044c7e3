"""log g of every anchor, over the batch in place of the data set (Eq. 9), with its gradient, in strips of rows: memory
grows with B, not with its square.

For anchors x_i with temperatures tau_i, candidates y_j and similarities s_ij = x_i . y_j:

    l_i     = log sum_j exp(s_ij / tau_i)           over the N_i negatives of anchor i
    log g_i = l_i - s_ii / tau_i - log N_i
    p_ij    = exp(s_ij / tau_i - l_i)               0 for candidates that are no negatives

    d log g_i / d x_i = (sum_j p_ij y_j - y_i) / tau_i           row i as an anchor
    d log g_i / d y_j = p_ij x_i / tau_i, and -x_i / tau_i for j = i          row j as a candidate of anchor i
    d log g_i / d(1/tau_i) = sum_j p_ij s_ij - s_ii

A row is an anchor of one side and a candidate of the other. Both need the same strip of similarities: as an anchor with
its own tau, l and incoming gradient, as a candidate with those of all anchors, three gathered numbers each. So nothing
of the features' size travels back through the gather, and a side needs one matrix product instead of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuclip.objectives.pairs import LOWEST, Pairs, gather_sides


@dataclass(frozen=True)
class Contrast:
    """What the batch says of each anchor."""

    log_g: Tensor  # (2, b) with graph; -inf without negatives
    mean_excess: Tensor  # (2, b) sum_j p_ij s_ij - s_ii
    accuracy: Tensor  # scalar: the share of images whose own text is the nearest of the batch


def contrast(pairs: Pairs, tau: Tensor) -> Contrast:
    """`tau` is a scalar, or one temperature per anchor (2, b). The mean over ranks of the gradients is the gradient of
    the mean over ranks."""
    inverse = (1 / tau).expand(2, len(pairs.positive))
    log_g, mean_excess, nearest = LogG.apply(pairs.features, inverse, pairs)
    accuracy = (nearest[0] <= pairs.positive.detach()).to(log_g.dtype).mean()
    return Contrast(log_g, mean_excess, accuracy)


class LogG(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, inverse: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
        log_sum, mean, nearest = features.new_empty(3, *inverse.shape)
        for rows, similarity in pairs.strips():
            peak = torch.amax(similarity, dim=2, out=nearest[:, rows])
            weight = (similarity - peak[..., None]).mul_(inverse[:, rows, None]).exp_()
            total = torch.sum(weight, dim=2, out=log_sum[:, rows])
            torch.linalg.vecdot(weight, similarity, out=mean[:, rows]).div_(total)
        alone = nearest == LOWEST  # no negatives: g = 0
        log_sum.log_().addcmul_(nearest, inverse).masked_fill_(alone, 0.0)
        mean_excess = mean.sub_(pairs.positive).masked_fill_(alone, 0.0)
        log_g = log_sum - pairs.positive * inverse - pairs.negatives.log()
        ctx.pairs = pairs
        ctx.save_for_backward(inverse, log_sum, mean_excess)
        ctx.mark_non_differentiable(mean_excess, nearest)
        return log_g.masked_fill_(alone, -torch.inf), mean_excess, nearest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        pairs, (inverse, log_sum, mean_excess) = ctx.pairs, ctx.saved_tensors
        own = torch.stack([gradient * inverse, inverse, -log_sum])
        of_all = gather_sides(own.movedim(0, 2)).movedim(2, 0).flip(1).contiguous()  # (3, 2, B) the other side's
        slopes = torch.empty_like(pairs.features)
        for rows, similarity in pairs.strips():
            factor, scale, offset = own[:, :, rows, None]
            slope = torch.addcmul(offset, similarity, scale).exp_().mul_(factor)
            factor, scale, offset = of_all[:, :, None]
            slope.addcmul_(torch.addcmul(offset, similarity, scale).exp_(), factor)
            for side in (0, 1):
                torch.mm(slope[side], pairs.all_features[1 - side], out=slopes[side, rows])
        for side in (0, 1):  # the own partner, once as candidate of each side's anchor
            slopes[side].addcmul_(own[0].sum(dim=0)[:, None], pairs.features[1 - side], value=-1)
        pairs.forget()
        return slopes, gradient * mean_excess, None
