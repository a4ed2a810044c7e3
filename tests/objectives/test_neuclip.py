"""Oracles 7 and 8, restarts, state, and the corners: NeuCLIP against autograd, torch.optim and central differences."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from neuclip.objectives.normalizers.prototype_network import RestartSchedule
from neuclip.objectives.normalizers.prototypes import Anchors, Prototypes, Workspace, anchors_at, prototype_gradient
from neuclip.objectives.normalizers.row_optimizer import RowOptimizer
from torch import Tensor

from neuclip import NeuCLIP
from neuclip.objectives.formulas import log_normalizer
from tests.objectives.features import CORNERS, close, corner, unit
from tests.references import contrastive

CASES = [(seed, tau, eps) for seed in (0, 1, 2) for tau in (0.07, 0.5) for eps in (1e-14, 1e-6, 1e-2)]
B, D, M = 10, 6, 7


def targets_and_positive(image: Tensor, text: Tensor, tau: Tensor, eps: float):
    s = image @ text.T
    mask = torch.eye(len(s), dtype=torch.bool)
    return [log_normalizer(x, s.diagonal(), tau=tau, eps=eps, excluded=mask) for x in (s, s.T)], s.diagonal()


def side(image: Tensor, text: Tensor, prototypes: int, tau: Tensor) -> Anchors:
    return anchors_at(tau, image, (image * text).sum(1), torch.tensor(prototypes, dtype=torch.float64).log())


@pytest.mark.parametrize(("seed", "tau", "eps"), CASES)
@pytest.mark.parametrize("fit", ["unified", "separate"])
def test_prototype_gradient_equals_autograd_and_is_orthogonal_to_its_prototype(seed, tau, eps, fit):
    image, text = unit(B, D, seed=seed), unit(B, D, seed=seed + 1)
    lengths, other = torch.arange(1.0, M + 1)[:, None], unit(M, D, seed=seed + 3)
    rows = (lengths * unit(M, D, seed=seed + 2)).requires_grad_()
    tau = torch.tensor(tau, dtype=torch.float64)
    reference = contrastive.unified_objective if fit == "unified" else contrastive.separate_objective
    (want,) = torch.autograd.grad(reference(image, text, rows, other, tau, rho=6.5, eps=eps), [rows])
    (target, _), _ = targets_and_positive(image, text, tau, eps)
    got = prototype_gradient(
        rows.detach(), side(image, text, M, tau), target, eps=eps, fit=fit, workspace=Workspace(B, rows.detach())
    )
    assert close(got, want, 1e-11)
    assert close((got * rows).sum(1), torch.zeros(M), 1e-14 * max(100, got.abs().max().item()))


@pytest.mark.parametrize("fit", ["unified", "separate"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "sgd"])
def test_five_inner_steps_follow_torchs_optimizers(optimizer, weight_decay, fit):
    image, text = unit(B, D, seed=3), unit(B, D, seed=4)
    tau, eps = torch.tensor(0.07, dtype=torch.float64), 1e-6
    (target, _), _ = targets_and_positive(image, text, tau, eps)
    prototypes = Prototypes(M, D, RowOptimizer(optimizer, 0.3, weight_decay, initial_accumulator=0.1)).double()
    prototypes.rows.copy_(unit(M, D, seed=5))
    parameter = torch.nn.Parameter(prototypes.rows.clone())
    torchs = {
        "adagrad": lambda p: torch.optim.Adagrad(p, 0.3, weight_decay=weight_decay, initial_accumulator_value=0.1),
        "adam": lambda p: torch.optim.AdamW(p, 0.3, weight_decay=weight_decay),  # decoupled, as Algorithm 3 has it
        "sgd": lambda p: torch.optim.SGD(p, 0.3, weight_decay=weight_decay),
    }[optimizer]([parameter])
    prototypes.learn(side(image, text, M, tau), target, steps=5, active=M, eps=eps, fit=fit)
    reference = contrastive.unified_objective if fit == "unified" else contrastive.separate_objective
    for _ in range(5):
        torchs.zero_grad()
        reference(image, text, parameter, prototypes.rows, tau, rho=6.5, eps=eps).backward()
        torchs.step()
    assert close(prototypes.rows, parameter.detach(), 1e-8)


@pytest.mark.parametrize(("seed", "tau", "eps"), CASES)
@pytest.mark.parametrize("alpha_gradient", ["full", "detached"])
def test_tower_and_temperature_gradients_equal_autograd_of_the_paper_objective(seed, tau, eps, alpha_gradient):
    objective = NeuCLIP(D, num_prototypes=M, inner_steps=3, eps=eps, network_lr=0.1, alpha_gradient=alpha_gradient)
    warm_up = unit(B, D, seed=seed + 7), unit(B, D, seed=seed + 8)
    objective(*warm_up, torch.tensor(1 / tau, dtype=torch.float64))
    image, text = (unit(B, D, seed=seed + k).requires_grad_() for k in (0, 1))
    scale = torch.tensor(1 / tau, dtype=torch.float64, requires_grad=True)
    got = objective(image, text, scale)
    rows = objective.network.for_image.rows.clone(), objective.network.for_text.rows.clone()
    want = contrastive.unified_objective(
        image, text, *rows, 1 / scale, rho=6.5, eps=eps, detach_alpha=alpha_gradient == "detached"
    )
    assert close(got, want, 1e-11)
    inputs = [image, text, scale]
    for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True):
        assert close(a, b, 1e-11)


def test_gradients_agree_with_central_differences():
    objective = NeuCLIP(D, num_prototypes=M, inner_steps=2, network_lr=0.1)
    objective(unit(B, D, seed=20), unit(B, D, seed=21), torch.tensor(10.0, dtype=torch.float64))
    objective.eval()  # the prototypes stand still
    image, text = (unit(B, D, seed=k).requires_grad_() for k in (0, 1))
    scale = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    gradients = torch.autograd.grad(objective(image, text, scale), [image, text, scale])
    step = 1e-6
    picks = [(0, (1, 2)), (0, (7, 5)), (1, (3, 0)), (1, (9, 4)), (2, ())]
    for which, where in picks:
        values = []
        for sign in (1, -1):
            moved = [x.detach().clone() for x in (image, text, scale)]
            moved[which][where] += sign * step
            values.append(objective(*moved).item())
        assert abs((values[0] - values[1]) / (2 * step) - gradients[which][where].item()) < 1e-6


@pytest.mark.parametrize(("num_prototypes", "expected"), [(4, [0, 2, 5, 7]), (10, list(range(10)))])
def test_a_restart_takes_evenly_spaced_rows_of_the_other_modality(num_prototypes, expected):
    objective = NeuCLIP(D, num_prototypes=num_prototypes, inner_steps=0)
    image, text = unit(B, D, seed=0), unit(B, D, seed=1)
    objective(image, text, torch.tensor(10.0))
    assert torch.equal(objective.network.for_image.rows, text[expected])
    assert torch.equal(objective.network.for_text.rows, image[expected])


def test_more_prototypes_than_pairs_fill_over_several_steps_and_count_only_what_is_there():
    objective = NeuCLIP(D, num_prototypes=25, inner_steps=0, restart_every=0)
    batches = [(unit(B, D, seed=k), unit(B, D, seed=50 + k)) for k in range(4)]
    actives = []
    for image, text in batches:
        objective(image, text, torch.tensor(10.0))
        actives.append(objective.network.schedule.active)
    assert actives == [10, 20, 25, 25]
    last = batches[2][1][[0, 2, 4, 6, 8]]  # five slots were left for ten rows: every second one
    assert torch.equal(objective.network.for_image.rows, torch.cat([batches[0][1], batches[1][1], last]))


def test_a_restart_that_falls_due_during_a_fill_waits_for_its_end():
    schedule = RestartSchedule(num_prototypes=25, restart="periodic", restart_every=2)
    written = [(None if (renewal := schedule.advance(10)) is None else renewal[0].tolist()) for _ in range(6)]
    fill = [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert written == fill + fill


@pytest.mark.parametrize("restart", ["periodic", "rolling"])
@pytest.mark.parametrize("restart_every", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("num_prototypes", [4, 10, 25, 30])
def test_the_steps_of_the_last_restart_are_those_that_wrote(num_prototypes, restart_every, restart):
    schedule = RestartSchedule(num_prototypes, restart, restart_every)
    assert not schedule.last_restart(10)
    wrote: list[int] = []
    for step in range(20):
        remaining = schedule.remaining
        if schedule.advance(10) is not None:
            wrote = [*wrote, step] if remaining or restart == "rolling" else [step]
        expected = wrote[-math.ceil(num_prototypes / 10) :] if restart == "rolling" else wrote
        assert list(schedule.last_restart(10)) == expected


def test_restart_keeps_adagrad_sums_unless_told_to_reset_them():
    for reset in (False, True):
        objective = NeuCLIP(D, num_prototypes=4, inner_steps=1, restart_every=1, reset_optimizer_at_restart=reset)
        first = unit(B, D, seed=0), unit(B, D, seed=1)
        objective(*first, torch.tensor(10.0))
        kept = objective.network.for_image.sums.clone()
        objective(unit(B, D, seed=2), unit(B, D, seed=3), torch.tensor(10.0))
        grew = (objective.network.for_image.sums >= kept).all()
        assert bool(grew) is not reset


def test_eval_mode_writes_nothing_and_without_prototypes_uses_the_batch():
    objective = NeuCLIP(D, num_prototypes=4).eval()
    before = {name: x.clone() for name, x in objective.state_dict().items() if isinstance(x, Tensor)}
    image, text = unit(B, D, seed=0), unit(B, D, seed=1)
    tau = torch.tensor(0.1, dtype=torch.float64)
    loss = objective(image, text, 1 / tau)
    targets, _ = targets_and_positive(image, text, tau, objective.settings.eps)
    assert torch.allclose(loss, tau * (targets[0].mean() + targets[1].mean() + 2 * objective.settings.rho))
    assert all(torch.equal(x, objective.state_dict()[name]) for name, x in before.items())
    assert objective.network.schedule.step == 0
    with pytest.raises(RuntimeError, match="train mode"):
        objective.log_normalizers(image, text, 1 / tau)


def test_saved_in_the_middle_of_a_fill_it_continues_to_the_bit():
    def steps(objective: NeuCLIP, which: range) -> list[float]:
        return [
            objective(unit(B, D, seed=k).float(), unit(B, D, seed=90 + k).float(), torch.tensor(14.0)).item()
            for k in which
        ]

    settings = {"num_prototypes": 25, "inner_steps": 2, "restart_every": 4}
    whole = NeuCLIP(D, **settings)
    want = steps(whole, range(9))
    first = NeuCLIP(D, **settings)
    got = steps(first, range(2))
    second = NeuCLIP(D, **settings)
    second.load_state_dict(first.state_dict())
    assert got + steps(second, range(2, 9)) == want


def test_no_outer_optimizer_can_find_the_prototypes():
    assert list(NeuCLIP(D).parameters()) == []


def test_metrics_tell_calibration_before_the_prototypes_saw_the_batch():
    objective = NeuCLIP(D, num_prototypes=M, inner_steps=3)
    objective(unit(B, D, seed=0), unit(B, D, seed=1), torch.tensor(10.0))
    assert objective.metrics["calibration"] is None  # nothing was stored yet
    image, text = unit(B, D, seed=2), unit(B, D, seed=3)
    scale = torch.tensor(10.0, dtype=torch.float64)
    predicted = objective.log_normalizers(image, text, scale)
    targets, _ = targets_and_positive(image, text, 1 / scale, objective.settings.eps)
    objective(image, text, scale)
    want = sum(torch.exp(t - a).mean() for t, a in zip(targets, predicted, strict=True)) / 2
    assert objective.metrics["calibration"] == pytest.approx(want.item(), rel=1e-6)


@pytest.mark.parametrize("tau", [0.005, 0.01, 0.07, 1.0])
@pytest.mark.parametrize("kind", [*CORNERS, "far apart"])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_loss_and_gradients_are_finite_for_every_temperature_and_any_unit_features(tau, kind, size):
    objective = NeuCLIP(8, num_prototypes=5, inner_steps=3, restart_every=2)
    if kind == "far apart":  # prototypes from quite other features, as after a change of data
        objective(*corner("one-hot", size), torch.tensor(1 / tau))
    for _ in range(3):
        image, text = (x.clone().requires_grad_() for x in corner(kind, size))
        scale = torch.tensor(1 / tau, requires_grad=True)
        loss = objective(image, text, scale)
        loss.backward()
        assert all(torch.isfinite(x).all() for x in (loss, image.grad, text.grad, scale.grad))
        state = [x for x in objective.state_dict().values() if isinstance(x, Tensor)]
        assert len(state) == 4 and all(torch.isfinite(x).all() for x in state)


def test_a_hard_row_at_the_lowest_temperature_is_finite():
    # s_ii = -0.2 and s_ij = 0.95: the normalizer is exp(115), beyond float32.
    image = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    text = torch.tensor([[-0.2, 0.9798], [0.95, 0.31225]]).requires_grad_()
    scale = torch.tensor(100.0, requires_grad=True)
    loss = NeuCLIP(2, num_prototypes=2)(F.normalize(image, dim=1), F.normalize(text, dim=1), scale)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(text.grad).all() and torch.isfinite(scale.grad)


def test_what_is_capped_is_counted():
    objective = NeuCLIP(3, num_prototypes=2, inner_steps=0, restart_every=0, eps=0.0)
    hot = torch.eye(3)
    objective(hot[[0, 1]], hot[[0, 1]], torch.tensor(100.0))  # prototypes: axes 0 and 1
    image, text = hot[[2, 2]], torch.stack([hot[0], hot[2]])  # image 0 finds text 1 at once, no prototype is near
    loss = objective(image, text, torch.tensor(100.0))
    assert torch.isfinite(loss) and objective.metrics["capped"] > 0


def test_under_bf16_autocast_the_objective_computes_in_float32():
    image, text = unit(B, D, seed=0).float(), unit(B, D, seed=1).float()
    plain = NeuCLIP(D, num_prototypes=4)(image, text, torch.tensor(100.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = NeuCLIP(D, num_prototypes=4)(image, text, torch.tensor(100.0))
    assert autocast.dtype == torch.float32 and torch.equal(plain, autocast)


def test_between_restarts_the_order_of_the_batch_does_not_matter():
    def run(permutation: Tensor) -> float:
        objective = NeuCLIP(D, num_prototypes=5, inner_steps=3, restart_every=0)
        objective(unit(B, D, seed=0), unit(B, D, seed=1), torch.tensor(10.0))
        image, text = unit(B, D, seed=2)[permutation], unit(B, D, seed=3)[permutation]
        return objective(image, text, torch.tensor(10.0)).item()

    assert run(torch.arange(B)) == pytest.approx(run(torch.randperm(B)), rel=1e-10)
