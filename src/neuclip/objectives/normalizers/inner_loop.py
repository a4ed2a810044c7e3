"""The inner steps: how prototypes learn from one batch (Algorithm 1, lines 6-8), by closed form, without a graph."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from neuclip.objectives.formulas.conjugate import capped_exponent
from neuclip.objectives.formulas.normalizer import add_eps

ADAGRAD_EPS = 1e-10  # torch.optim.Adagrad's


@torch.no_grad()
def prototype_gradient(
    rows: Tensor, anchors: Tensor, positive: Tensor, log_normalizer: Tensor, *, tau: Tensor, eps: float
) -> Tensor:  # (m, d), (B, d), (B,), (B,) -> (m, d)
    """The gradient of Eq. 12 with respect to one side's prototypes: two matrix products, one (B, m) buffer.

    tau cancels: F carries a factor tau and the similarity a factor 1/tau.
    """
    lengths = rows.norm(dim=1, keepdim=True)
    unit = rows / lengths
    # excess_ij = (cos_ij - s_ii) / tau - log m: scaling the smaller matrix and adding inside the product saves two
    # passes over (B, m).
    offset = -(positive / tau) - math.log(len(rows))
    excess = torch.addmm(offset[:, None], anchors / tau, unit.T)
    largest = excess.amax(dim=1)
    excess.sub_(largest[:, None]).exp_()
    alpha = add_eps(largest + excess.sum(dim=1).log(), eps)
    # dF/d excess_ij = (1 - r_i) exp(excess_ij - alpha_i) / B. The factor of row i goes to the smaller matrix.
    weight = -torch.expm1(capped_exponent(log_normalizer, alpha)) * torch.exp(largest - alpha) / len(anchors)
    pull = excess.T @ (weight[:, None] * anchors)
    return (pull - (pull * unit).sum(dim=1, keepdim=True) * unit) / lengths  # through the division by the length


@torch.no_grad()
def adagrad_step(rows: Tensor, sums: Tensor, gradient: Tensor, *, learning_rate: float, weight_decay: float) -> None:
    """torch.optim.Adagrad's update, in place."""
    if weight_decay:
        gradient = gradient + weight_decay * rows
    sums.addcmul_(gradient, gradient)
    rows.addcdiv_(gradient, sums.sqrt().add_(ADAGRAD_EPS), value=-learning_rate)
