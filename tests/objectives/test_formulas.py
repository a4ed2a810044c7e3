"""Oracles 1 and 6 of the objective: log-normalizers, and the conjugate form at and away from its minimum."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip.objectives.formulas.conjugate import calibration_ratio, unified_objective
from neuclip.objectives.formulas.normalizer import log_normalizer, prototype_log_normalizer
from tests.references import contrastive

SEEDS = (0, 1, 2)
CASES = [(tau, eps) for tau in (0.07, 0.5) for eps in (0.0, 1e-14, 1e-6, 1e-2)] + [(0.01, 1e-6)]


def unit(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.bool)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("tau", "eps"), CASES)
def test_log_normalizer_equals_the_double_loop(seed, tau, eps):
    s = unit(8, 6, seed=seed) @ unit(8, 6, seed=seed + 10).T
    got = log_normalizer(s, s.diagonal(), tau=torch.tensor(tau, dtype=torch.float64), eps=eps, excluded=eye(8))
    want = [contrastive.log_normalizer(s.tolist(), i, tau, eps) for i in range(8)]
    assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("tau", "eps"), CASES)
def test_prototype_log_normalizer_equals_the_double_loop(seed, tau, eps):
    anchors, rows = unit(6, 5, seed=seed), 3 * torch.randn(7, 5, dtype=torch.float64)
    positive = unit(6, 5, seed=seed + 1).mul(anchors).sum(1)
    cosine = anchors @ F.normalize(rows, dim=1).T
    got = prototype_log_normalizer(cosine, positive, tau=torch.tensor(tau, dtype=torch.float64), eps=eps)
    want = [
        contrastive.alpha(anchors[i].tolist(), positive[i].item(), rows.tolist(), tau, eps) for i in range(len(anchors))
    ]
    assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_an_excluded_twin_leaves_both_the_sum_and_the_count():
    s = torch.tensor([[0.9, 0.3, 0.1]], dtype=torch.float64)
    excluded = torch.tensor([[True, True, False]])
    got = log_normalizer(s, s[:, 0], tau=torch.tensor(0.1, dtype=torch.float64), eps=0.0, excluded=excluded)
    assert torch.allclose(got, torch.tensor([-8.0], dtype=torch.float64))


def test_a_row_without_candidates_has_log_eps_and_no_gradient():
    s = torch.tensor([[0.3]], requires_grad=True)
    value = log_normalizer(s, s.diagonal(), tau=torch.tensor(0.07), eps=1e-6, excluded=eye(1))
    value.sum().backward()
    assert torch.allclose(value, torch.tensor(1e-6).log())
    assert torch.equal(s.grad, torch.zeros(1, 1))


def test_float32_stays_finite_where_the_normalizer_itself_overflows():
    s = torch.full((4, 4), 0.95).fill_diagonal_(-0.95).requires_grad_()
    value = log_normalizer(s, s.diagonal(), tau=torch.tensor(0.01), eps=1e-6, excluded=eye(4))
    value.sum().backward()
    assert torch.allclose(value, torch.tensor(190.0))
    assert torch.isfinite(s.grad).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_conjugate_form_equals_the_robust_loss_exactly_at_its_minimum(seed):
    tau, rho = torch.tensor(0.07, dtype=torch.float64), 6.5
    targets = (10 * unit(9, seed=seed), 10 * unit(9, seed=seed + 1))
    at_minimum = unified_objective(targets, targets, tau=tau, rho=rho)
    assert torch.allclose(at_minimum, tau * (targets[0].mean() + targets[1].mean() + 2 * rho), atol=1e-12, rtol=1e-12)
    for shift in (-1.0, -0.1, 0.1, 1.0):
        assert unified_objective(targets, (targets[0] + shift, targets[1]), tau=tau, rho=rho) > at_minimum


def test_full_detached_and_mini_batch_gradients_agree_at_the_minimum():
    targets = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    tau = torch.tensor(0.1, dtype=torch.float64)
    full = torch.autograd.grad(unified_objective(tuple(targets), tuple(targets), tau=tau, rho=1.0), targets)
    detached = tuple(t.detach() for t in targets)
    stopped = torch.autograd.grad(unified_objective(tuple(targets), detached, tau=tau, rho=1.0), targets)
    plain = torch.autograd.grad(tau * sum(t.mean() for t in targets), targets)
    for a, b, c in zip(full, stopped, plain, strict=True):
        assert torch.allclose(a, c, atol=1e-14) and torch.allclose(b, c, atol=1e-14)


def test_a_capped_ratio_keeps_its_pull():
    alpha = torch.tensor([-100.0], requires_grad=True)
    ratio = calibration_ratio(torch.zeros(1), alpha)
    ratio.sum().backward()
    assert torch.allclose(ratio, torch.tensor([40.0]).exp())
    assert torch.allclose(alpha.grad, -torch.tensor([40.0]).exp())
