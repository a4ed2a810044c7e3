"""SCENT against the minimum that defines its step, a table in linear space, autograd, and FastCLIP where both agree."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from neuclip import CLIP, SCENT, FastCLIP
from tests.objectives.features import close, number, same_gradients, unit

N, B, D, EPS, RHO = 11, 6, 5, 1e-6, 6.5
# New samples, old ones, and from the third batch on a sample twice in one batch.
VISITS = [[0, 1, 2, 3, 4, 5], [3, 4, 6, 0, 7, 8], [9, 9, 1, 6, 2, 0], [5, 8, 5, 4, 3, 9], [0, 1, 0, 3, 0, 10]]


def batch(step: int) -> tuple[Tensor, Tensor]:
    return unit(B, D, seed=2 * step).requires_grad_(), unit(B, D, seed=2 * step + 1).requires_grad_()


def table(objective: SCENT) -> Tensor:  # (2, n): log u of both sides
    return objective.state_dict()["table.rows"].T


# The step.


@pytest.mark.parametrize("log_alpha", [-5.0, 0.0, 1.5, 10.0])
def test_a_visit_moves_to_the_minimum_of_the_loss_plus_the_distance_from_what_is_stored(log_alpha):
    old, target = torch.randn(2, 2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4
    low, high = torch.minimum(old, target), torch.maximum(old, target)
    for _ in range(100):  # bisection of the derivative of exp(target - nu) + nu + D(nu, old) / alpha
        middle = (low + high) / 2
        slope = 1 - torch.exp(target - middle) + math.exp(-log_alpha) * (torch.exp(-old) - torch.exp(-middle))
        low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
    assert close(SCENT(N, log_alpha=log_alpha).renew(old, target), middle, 1e-12)


FLOATS = st.floats(-200, 200, width=32)


@given(old=FLOATS, target=FLOATS, log_alpha=FLOATS)
def test_a_visit_ends_between_what_is_stored_and_what_the_batch_says_whatever_their_size(old, target, log_alpha):
    found = SCENT(N, log_alpha=log_alpha).renew(torch.tensor(old), torch.tensor(target)).item()
    assert math.isfinite(found) and min(old, target) - 1e-4 <= found <= max(old, target) + 1e-4


@pytest.mark.parametrize(("log_u", "gamma"), [(-13.8, 0.0219), (-10.0, 0.5), (-5.0, 0.9933), (0.0, 0.99995)])
def test_the_weight_of_a_visit_grows_with_the_stored_normalizer(log_u, gamma):
    objective = SCENT(N)
    found = objective.renew(torch.tensor(log_u, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    assert objective.metrics["gamma"] == pytest.approx(gamma, rel=5e-3)
    assert found.exp().item() == pytest.approx((1 - gamma) * math.exp(log_u) + gamma * math.e, rel=5e-3)


def test_history_is_kept_where_the_weight_of_a_visit_rounds_to_one():
    found = SCENT(N).renew(torch.tensor(20.0), torch.tensor(-13.0))  # log(1 + exp(-3)) - 10, and not -13
    assert found.item() == pytest.approx(math.log1p(math.exp(-3)) - 10, abs=1e-5)


@pytest.mark.parametrize("log_u", [-12.0, -10.0, -3.0])
def test_entries_of_one_value_move_as_fastclips_with_that_gamma(log_u):
    target = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gamma = 1 / (1 + math.exp(-10 - log_u))
    want = FastCLIP(N, gamma=gamma, gamma_schedule="constant").renew(torch.full_like(target, log_u), target)
    assert close(SCENT(N).renew(torch.full_like(target, log_u), target), want, 1e-13)


# The loss.


class Reference:
    """The method row by row: u in linear space, gradients by autograd."""

    def __init__(self, log_alpha: float, doubled: bool):
        self.alpha, self.doubled = math.exp(log_alpha), doubled
        self.u: dict[tuple[int, int], float] = {}  # (side, sample)

    def loss(self, image: Tensor, text: Tensor, tau: Tensor, ids: list[int]) -> tuple[float, Tensor]:
        """The value of the loss, and a scalar whose gradient is the method's."""
        inside = 2 * tau - tau.detach() if self.doubled else tau
        value, through = 2 * tau.item() * RHO, 2 * tau * RHO
        for side, s in enumerate((image @ text.T, text @ image.T)):
            g = []
            for i, own in enumerate(ids):
                others = [j for j, sample in enumerate(ids) if sample != own]
                g.append(sum(torch.exp((s[i, j] - s[i, i]) / inside) for j in others) / len(others))
            self.visit(side, ids, [x.item() for x in g])
            for i, own in enumerate(ids):
                u = self.u[side, own]
                value += tau.item() * math.log(u) / len(ids)
                through = through + (tau * math.log(u) + tau.detach() * g[i] / u) / len(ids)
        return value, through

    def visit(self, side: int, ids: list[int], g: list[float]) -> None:
        for sample in set(ids):
            said = [EPS + g[i] for i in range(len(ids)) if ids[i] == sample]
            now = sum(said) / len(said)
            before = self.u.get((side, sample), now)
            self.u[side, sample] = before * (1 + self.alpha * now) / (1 + self.alpha * before)


@pytest.mark.filterwarnings("ignore:logit_scale is 2")
@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize(("log_alpha", "tau"), [(1.0, 0.07), (-1.0, 0.5), (10.0, 0.03)])
def test_five_steps_equal_the_reference(log_alpha, tau, doubled):
    objective = SCENT(N, log_alpha=log_alpha, temperature_gradient="fastclip" if doubled else "paper")
    reference = Reference(log_alpha, doubled)
    for step, ids in enumerate(VISITS):
        leaves = [*batch(step), number(1 / tau)]
        got = objective(*leaves, sample_ids=torch.tensor(ids))
        value, through = reference.loss(*leaves[:2], 1 / leaves[2], ids)
        assert got.item() == pytest.approx(value, rel=1e-11)
        assert same_gradients(got, through, leaves, 1e-11)
    stored = table(objective)
    for (side, sample), u in reference.u.items():
        assert math.exp(stored[side, sample]) == pytest.approx(u, rel=1e-11)


def test_a_large_step_is_the_minibatch_form_and_a_small_one_keeps_the_first_visit():
    large, small, plain = SCENT(N, log_alpha=60.0), SCENT(N, log_alpha=-60.0), CLIP(form="minibatch")
    ids = torch.tensor(VISITS[0])
    for step in range(3):
        leaves = [*batch(step), number(1 / 0.07)]
        got, want = large(*leaves, sample_ids=ids), plain(*leaves)
        assert close(got, want, 1e-12) and same_gradients(got, want, leaves, 1e-11)
        small(*leaves, sample_ids=ids)
    first = torch.stack(CLIP(eps=EPS).log_normalizers(*batch(0), number(1 / 0.07)))
    assert close(table(small)[:, ids], first, 1e-12)


def test_with_fixed_features_a_falling_step_brings_the_table_near_the_exact_normalizers():
    n, size, tau = 200, 16, torch.tensor(1 / 0.2, dtype=torch.float64)
    image, text = unit(n, 8, seed=0), unit(n, 8, seed=1)
    exact = torch.stack(CLIP(eps=EPS).log_normalizers(image, text, tau))
    generator, errors, state = torch.Generator().manual_seed(2), [], None
    for log_alpha in (2.0, -2.0, -6.0):
        objective = SCENT(n, log_alpha=log_alpha).double()
        if state is not None:
            objective.load_state_dict(state)
        for _ in range(20):
            for ids in torch.randperm(n, generator=generator)[: n // size * size].split(size):
                objective(image[ids], text[ids], tau, sample_ids=ids)
        state = objective.state_dict()
        errors.append((table(objective) - exact).square().mean().sqrt().item())
    assert errors[1] < 0.75 * errors[0] and errors[2] < 0.75 * errors[1], errors  # 0.50, 0.29, 0.17
