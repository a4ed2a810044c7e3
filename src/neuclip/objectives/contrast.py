"""The one gradient that all softmax-like objectives share, in closed form.

For anchors x_i with temperatures tau_i, candidates y_j, similarities s_ij = x_i . y_j and constants c_i:

    F           = 1/B sum_i sum_j w_ij,  w_ij = exp(s_ij / tau_i - c_i), and 0 for excluded candidates
    dF / dx_i   = 1/B sum_j (w_ij / tau_i) y_j        row i as an anchor
    dF / dy_j   = 1/B sum_i (w_ij / tau_i) x_i        row j as a candidate of every anchor i
    dF / dtau_i = - 1/B sum_j w_ij s_ij / tau_i^2
    dF / ds_ii  = - 1/B sum_j w_ij / tau_i            only where c_i contains s_ii / tau_i

Mean g_i / nu_i (Eq. 9) is F with c_i = s_ii / tau_i + log N_i + log nu_i, N_i the number of negatives.

A row is an anchor of one side and a candidate of the other. Both need the same (b, B) block of similarities: as an
anchor with its own tau and c, as a candidate with those of all anchors, two gathered numbers each. So nothing travels
back through the gather, and each side needs one matrix product instead of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from neuclip.distributed.collectives import gather_values
from neuclip.objectives.formulas import gradient_only
from neuclip.objectives.pairs import Both, Pairs


def mean_normalizer_ratio(pairs: Pairs, tau: Tensor | Both, log_normalizer: Both) -> Tensor:
    """Both sides' mean of g_i / nu_i, nu = exp(log_normalizer) (b,) held constant; g as in Eq. 9.

    tau times its gradient is that of Eq. 1 where nu = eps + g: the mini-batch form.
    """
    taus = _per_side(tau)
    image, text = (
        (pairs.positive / t + pairs.num_negatives.log() + log_nu).detach()
        for t, log_nu in zip(taus, log_normalizer, strict=True)
    )
    ratio, gradient_terms, row_sums = weighted_candidate_sum(pairs, taus, (image, text))
    # dF / ds_ii, and its part of dF / dtau_i: both are local, so ordinary autograd takes them.
    of_image, of_text = ((row_sum * pairs.positive / t).mean() for t, row_sum in zip(taus, row_sums, strict=True))
    return ratio + gradient_only(gradient_terms - (of_image + of_text))


def candidate_sum(pairs: Pairs, tau: Tensor | Both, offset: Both) -> Tensor:
    """Both sides' mean over anchors of sum_j exp(s_ij / tau - offset_i), over the candidates that are not excluded.

    `offset` (b,), (b,) is held constant; `tau` is a scalar with gradient, or one constant per anchor and side.
    """
    value, gradient_terms, _ = weighted_candidate_sum(pairs, _per_side(tau), offset)
    return value + gradient_only(gradient_terms)


def weighted_candidate_sum(pairs: Pairs, taus: Both, offset: Both) -> tuple[Tensor, Tensor, Both]:
    """F of both sides, c being `offset`, as a value; terms that have its gradient; and every anchor's sum_j w_ij."""
    b = len(pairs.image)
    inverse = [(1 / t.detach()).expand(b) for t in taus]
    of_all = gather_values(torch.stack([*offset, *inverse], dim=1).detach())  # (B, 4)
    gradient_terms, row_sums = pairs.all_image.new_zeros(()), []
    for side, (rows, candidates) in enumerate(((pairs.image, pairs.all_text), (pairs.text, pairs.all_image))):
        other = 1 - side
        similarity = pairs.similarities[side]
        weight = _weights(similarity, inverse[side][:, None], offset[side].detach()[:, None], pairs.excluded)
        row_sums.append(weight.sum(dim=1))
        if torch.is_grad_enabled() and taus[side].requires_grad:
            moment = torch.linalg.vecdot(weight, similarity).mean()
            gradient_terms = gradient_terms + moment / taus[side]  # d/dtau of moment / tau is - moment / tau^2
        if torch.is_grad_enabled() and rows.requires_grad:
            weight *= inverse[side][:, None]
            # The same rows as candidates of the other side's anchors, of all ranks. The mean is over the global batch;
            # DDP will divide by the number of ranks, so here it is over the local one.
            as_candidate = _weights(similarity, of_all[:, 2 + other], of_all[:, other], pairs.excluded)
            weight.addcmul_(as_candidate, of_all[:, 2 + other].expand_as(weight))
            gradient_terms = gradient_terms + (rows * (weight @ candidates)).sum() / b
    image, text = row_sums
    return image.mean() + text.mean(), gradient_terms, (image, text)


def _weights(similarity: Tensor, inverse: Tensor, offset: Tensor, excluded: Tensor) -> Tensor:  # (b, B)
    weight = similarity * inverse
    return weight.sub_(offset).exp_().masked_fill_(excluded, 0.0)


def _per_side(tau: Tensor | Both) -> Both:
    return tau if isinstance(tau, tuple) else (tau, tau)
