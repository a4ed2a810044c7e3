"""The paper's equations against plain Python, and where float32 ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from neuclip.objectives.formulas import (
    add_eps,
    conjugate,
    gradient_only,
    ratio,
    robust_loss,
    unified_objective,
)

LOGS = torch.tensor([[0.3, -2.0, 1.5], [-30.0, 0.0, 4.0]], dtype=torch.float64)
ALPHA = torch.tensor([[0.1, -1.0, 1.5], [-12.0, 0.5, 3.0]], dtype=torch.float64)
TAU = torch.tensor(0.07, dtype=torch.float64)


def side_means(function) -> float:
    """The mean over the anchors of a side, image side plus text side, by Python's floats."""
    sides = zip(LOGS.tolist(), ALPHA.tolist(), strict=True)
    return sum(sum(function(l, a) for l, a in zip(*side, strict=True)) / 3 for side in sides)


@pytest.mark.parametrize("eps", [0.0, 1e-14, 1e-6, 1e-2])
def test_eps_is_added_inside_the_logarithm(eps):
    want = [[math.log(eps + math.exp(x)) for x in side] for side in LOGS.tolist()]
    assert torch.allclose(add_eps(LOGS, eps), torch.tensor(want, dtype=torch.float64), rtol=1e-13)


def test_eps_is_the_floor_of_a_normalizer_without_candidates():
    assert add_eps(torch.tensor([-math.inf]), 1e-6).item() == pytest.approx(math.log(1e-6))
    assert add_eps(torch.tensor([-math.inf]), 0.0).item() == -math.inf


def test_eq_1_is_tau_times_the_mean_logarithm_of_both_sides_and_two_rho():
    want = 0.07 * side_means(lambda l, a: l) + 2 * 0.07 * 3.0
    assert robust_loss(LOGS, TAU, 3.0).item() == pytest.approx(want, rel=1e-14)


def test_eq_12_is_the_paper_s_to_the_letter():
    want = 0.07 * side_means(lambda l, a: math.exp(-a) * math.exp(l) + a) + 2 * 0.07 * (3.0 - 1)
    assert unified_objective(LOGS, ALPHA, TAU, 3.0).item() == pytest.approx(want, rel=1e-14)


@given(shift=st.floats(-5, 5), place=st.integers(0, 5))
def test_no_prediction_makes_eq_12_smaller_than_eq_1_and_the_right_one_makes_them_equal(shift, place):
    alpha = LOGS.flatten().clone()
    alpha[place] += shift
    above = unified_objective(LOGS, alpha.view(2, 3), TAU, 3.0) - robust_loss(LOGS, TAU, 3.0)
    assert above >= -1e-15 and (above < 1e-14 or shift != 0)


def test_the_conjugate_has_its_minimum_where_alpha_is_right():
    alpha = LOGS.clone().requires_grad_()
    value = conjugate(LOGS, alpha)
    (slope,) = torch.autograd.grad(value.sum(), alpha)
    assert torch.allclose(value, 1 + LOGS, rtol=1e-14) and torch.equal(slope, torch.zeros_like(slope))


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 40.0), (torch.float64, 300.0)])
@pytest.mark.parametrize("beyond", [-0.5, 0.5, 500.0])
def test_a_ratio_is_capped_in_value_and_its_gradient_stays_that_of_the_cap(dtype, largest, beyond):
    alpha = torch.tensor([-largest - beyond], dtype=dtype, requires_grad=True)
    got = ratio(torch.zeros(1, dtype=dtype), alpha)
    got.sum().backward()
    want = torch.tensor([largest + min(beyond, 0.0)], dtype=dtype).exp()
    assert torch.allclose(got, want) and torch.allclose(alpha.grad, -want)


def test_a_value_that_is_gradient_only_is_exactly_zero_with_its_gradient():
    x: Tensor = torch.tensor(0.1, requires_grad=True)
    nothing = gradient_only(3 * x)
    nothing.backward()
    assert nothing.item() == 0 and x.grad.item() == 3
