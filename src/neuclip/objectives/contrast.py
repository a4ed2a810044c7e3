"""Pushing anchors and candidates apart: the one gradient that all softmax-like objectives share.

Whatever normalizers a method believes in, its towers receive the gradient of g_i / nu_i, summed over both sides, with
nu held constant. So it is written once, in closed form: a local row's gradient as an anchor and its gradient as a
candidate of every other anchor come from the same (b, B) block, given a few numbers of each anchor. Nothing travels
back through the gather, and each side needs one matrix product instead of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from neuclip.distributed.collectives import gather_values
from neuclip.objectives.pairs import Both, Pairs


def mean_normalizer_ratio(pairs: Pairs, tau: Tensor | Both, log_normalizer: Both) -> Tensor:
    """Both sides' mean of g_i / nu_i, nu = exp(log_normalizer) (b,) held constant; g as in Eq. 9.

    tau times its gradient is that of Eq. 1 where nu = eps + g: the mini-batch form.
    """
    taus = _per_side(tau)
    weights, shift = [], []
    for t, log_nu in zip(taus, log_normalizer, strict=True):
        shift.append((pairs.positive / t + pairs.others.log() + log_nu).detach())
    pushed, totals = _pushed(pairs, taus, (shift[0], shift[1]))
    # g_i is relative to the anchor's own positive, which is local: ordinary autograd sees to it.
    for t, total in zip(taus, totals, strict=True):
        weights.append((total * pairs.positive / t).mean())
    pulled = weights[0] + weights[1]
    return pushed - (pulled - pulled.detach())


def candidate_sum(pairs: Pairs, tau: Tensor | Both, offset: Both) -> Tensor:
    """Both sides' mean over anchors of sum_j exp(s_ij / tau - offset_i), over the candidates that are not excluded.

    `offset` (b,), (b,) is held constant; `tau` is a scalar with gradient, or one constant per anchor and side.
    """
    return _pushed(pairs, _per_side(tau), offset)[0]


def _pushed(pairs: Pairs, taus: Both, offset: Both) -> tuple[Tensor, Both]:
    """The scalar of `candidate_sum` with its gradient, and each anchor's own sum (b,), (b,) without."""
    b = len(pairs.image)
    inverse = [(1 / t.detach()).expand(b) for t in taus]
    of_all = gather_values(torch.stack([*offset, *inverse], dim=1).detach())  # (B, 4)
    sides = []
    for side, (rows, candidates) in enumerate(((pairs.image, pairs.all_text), (pairs.text, pairs.all_image))):
        other = 1 - side
        similarity = pairs.similarities()[side]
        weight = _weights(similarity, inverse[side][:, None], offset[side].detach()[:, None], pairs.excluded)
        total = weight.sum(dim=1)
        value = total.mean()
        if torch.is_grad_enabled() and taus[side].requires_grad:
            moment = torch.linalg.vecdot(weight, similarity).mean()
            value = value + _first_order(moment / taus[side])  # d/dtau exp(s / tau) = -s / tau^2 exp(s / tau)
        if torch.is_grad_enabled() and rows.requires_grad:
            weight *= inverse[side][:, None]
            # What the other side's anchors, of all processes, say of this row as their candidate. Their mean is over
            # the global batch; DDP will divide by the number of processes, so here it is over the local one.
            as_candidate = _weights(similarity, of_all[:, 2 + other], of_all[:, other], pairs.excluded)
            weight.addcmul_(as_candidate, of_all[:, 2 + other].expand_as(weight))
            value = value + _first_order((rows * (weight @ candidates)).sum() / b)
        sides.append((value, total))
    return sides[0][0] + sides[1][0], (sides[0][1], sides[1][1])


def _weights(similarity: Tensor, inverse: Tensor, offset: Tensor, excluded: Tensor) -> Tensor:  # (b, B)
    weight = similarity * inverse
    return weight.sub_(offset).exp_().masked_fill_(excluded, 0.0)


def _first_order(value: Tensor) -> Tensor:
    """Zero, with the gradient of `value`."""
    return value - value.detach()


def _per_side(tau: Tensor | Both) -> Both:
    return tau if isinstance(tau, tuple) else (tau, tau)
