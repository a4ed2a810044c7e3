"""Appendix A.2: FastCLIP's moving average is a step of stochastic block mirror descent on the conjugate form (Eq. 6).

With y = exp(-alpha), anchor i of a batch takes y <- argmin_y y (eps + g_i) - log y + D(y, y_before) / eta, where
D(u, v) = -log u + log v + (u - v) / v. Then 1/y is u of Eq. 3 with gamma = eta / (1 + eta), and the gradient of the
conjugate form in the features, y held constant, is Eq. 4. The argmin is found by bisection, not by its closed form.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from neuclip import FastCLIP
from tests.objectives.features import number, unit
from tests.references.contrastive import log_g

N, B, D, EPS, RHO, TAU = 9, 5, 4, 1e-3, 3.0, 0.1
IDS = [torch.tensor([0, 1, 2, 3, 4]), torch.tensor([3, 0, 4, 1, 2]), torch.tensor([4, 2, 0, 7, 1])]  # 7 is new
ETAS = [0.25, 1.0, 9.0]


def step_objective(y: Tensor, normalizer: float, before: float, eta: float) -> Tensor:
    """What a block of mirror descent minimises, word for word."""
    divergence = -torch.log(y) + math.log(before) + (y - before) / before
    return y * normalizer - torch.log(y) + divergence / eta


def argmin(normalizer: float, before: float, eta: float) -> float:
    """Of a convex function: where its derivative, by autograd, changes its sign. To the last bits."""
    low, high = -60.0, 60.0  # log y
    for _ in range(200):
        middle = number(math.exp((low + high) / 2))
        (slope,) = torch.autograd.grad(step_objective(middle, normalizer, before, eta), middle)
        low, high = ((low + high) / 2, high) if slope < 0 else (low, (low + high) / 2)
    return math.exp(low)


def normalizers(image: Tensor, text: Tensor, tau: Tensor) -> Tensor:  # (2, B)
    return EPS + log_g(image, text, tau.expand(2, B), ~torch.eye(B, dtype=torch.bool)).exp()


def test_bisection_finds_the_lowest_point():
    found = argmin(0.7, 2.0, 0.5)
    lowest = step_objective(number(found), 0.7, 2.0, 0.5)
    assert all(step_objective(number(found * factor), 0.7, 2.0, 0.5) > lowest for factor in (0.999, 1.001, 0.1, 10))


@pytest.mark.parametrize("eta", ETAS)
def test_the_moving_average_is_a_step_of_mirror_descent_in_value_and_gradient(eta):
    objective = FastCLIP(N, gamma=eta / (1 + eta), gamma_schedule="constant", eps=EPS, rho=RHO)
    y: dict[tuple[int, int], float] = {}  # by side and sample
    for step, ids in enumerate(IDS):
        image, text = (unit(B, D, seed=10 * step + side).requires_grad_() for side in (0, 1))
        tau = number(TAU)
        loss = objective(image, text, 1 / tau, sample_ids=ids)
        normalizer = normalizers(image, text, tau)
        for side in (0, 1):
            for place, sample in enumerate(ids.tolist()):
                new = normalizer[side, place].item()
                known = y.get((side, sample))
                y[side, sample] = 1 / new if known is None else argmin(new, known, eta)
        used = torch.tensor([[y[side, i] for i in ids.tolist()] for side in (0, 1)], dtype=torch.float64)
        log_u = objective.table.read(ids).T
        assert torch.allclose(log_u, -used.log(), rtol=0, atol=1e-12)
        conjugate = tau * (used * normalizer - used.log()).mean(dim=1).sum() + 2 * tau * (RHO - 1)
        expected = torch.autograd.grad(conjugate, [image, text], retain_graph=True)
        found = torch.autograd.grad(loss, [image, text])
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)


def test_the_weight_of_a_visit_is_not_the_step_size_itself():
    """gamma = eta / (1 + eta): with gamma = eta the two would part at once."""
    before, new, eta = 2.0, 0.7, 0.25
    moved = 1 / argmin(new, before, eta)
    gamma = eta / (1 + eta)
    assert moved == pytest.approx((1 - gamma) / before + gamma * new, rel=1e-13)
    assert moved != pytest.approx((1 - eta) / before + eta * new, rel=1e-3)
