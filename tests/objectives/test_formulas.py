"""Oracle 1 of the objective: log-normalizers of batch and prototypes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from neuclip.objectives.normalizers.prototypes import anchors_at, scores
from torch import Tensor

from neuclip.objectives.formulas import calibration_ratio, log_normalizer
from tests.objectives.features import unit
from tests.references import contrastive

SEEDS = (0, 1, 2)
CASES = [(tau, eps) for tau in (0.07, 0.5) for eps in (0.0, 1e-14, 1e-6, 1e-2)] + [(0.01, 1e-6)]


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
def test_the_prototypes_prediction_equals_the_double_loop(seed, tau, eps):
    anchors, rows = unit(6, 5, seed=seed), 3 * unit(7, 5, seed=seed + 9)
    positive = unit(6, 5, seed=seed + 1).mul(anchors).sum(1)
    temperature, count = torch.tensor(tau, dtype=torch.float64), torch.tensor(7.0, dtype=torch.float64)
    seen = anchors_at(temperature, anchors, positive, count.log())
    buffer = torch.empty(6, 7, dtype=torch.float64)
    got = scores(F.normalize(rows, dim=1), seen, buffer).alpha(eps)
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


def test_a_capped_ratio_keeps_its_pull():
    alpha = torch.tensor([-100.0], requires_grad=True)
    ratio = calibration_ratio(torch.zeros(1), alpha)
    ratio.sum().backward()
    assert torch.allclose(ratio, torch.tensor([40.0]).exp())
    assert torch.allclose(alpha.grad, -torch.tensor([40.0]).exp())
