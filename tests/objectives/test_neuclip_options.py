"""NeuCLIP beyond its defaults: rolling restarts, masks, the doubled temperature gradient, Algorithm 3 and the MLP."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from neuclip import CLIP, FastCLIP, NeuCLIP
from neuclip.settings.objectives import NeuCLIPSettings
from neuclip.settings.sections import OptimizerSettings
from tests.objectives.features import unit
from tests.references import contrastive

B, D = 6, 5
TAU = 0.2
RHO, EPS = NeuCLIPSettings.rho, NeuCLIPSettings.eps
SCALE = torch.tensor(1 / TAU, dtype=torch.float64)


def batch(step: int) -> tuple[Tensor, Tensor]:
    return unit(B, D, seed=step), unit(B, D, seed=1000 + step)


def log_mean(anchor: Tensor, partner: Tensor, candidates: Tensor, eps: float) -> float:
    """log(eps + mean exp((cos - positive) / tau)) over the rows of `candidates`, by hand."""
    excess = [math.exp((anchor @ row - anchor @ partner).item() / TAU) for row in candidates]
    return math.log(eps + (sum(excess) / len(excess) if excess else 0.0))


@pytest.mark.parametrize("num_prototypes", [4, 6, 15])
def test_a_rolling_restart_without_inner_steps_is_a_queue_of_the_newest_features(num_prototypes):
    objective = NeuCLIP(D, num_prototypes=num_prototypes, restart="rolling", inner_steps=0)
    for step in range(7):
        objective(*batch(step), SCALE)
    newest = torch.cat([batch(step)[1] for step in range(7)])
    if num_prototypes < B:
        newest = batch(6)[1][[0, 1, 3, 4]]  # fewer slots than rows: evenly spaced ones
    rows = objective.network.for_image.rows
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, newest[-num_prototypes:].tolist()))
    image, text = batch(8)
    estimate, _ = objective.log_normalizers(image, text, SCALE)
    want = [log_mean(image[i], text[i], newest[-num_prototypes:], EPS) for i in range(B)]
    assert torch.allclose(estimate, torch.tensor(want, dtype=torch.float64), rtol=1e-12)


def test_rolling_forgets_the_sums_of_exactly_the_slots_it_renews():
    objective = NeuCLIP(D, num_prototypes=3 * B, restart="rolling", inner_steps=1)
    for step in range(3):
        objective(*batch(step), SCALE)
    before = objective.network.for_image.sums.clone()
    objective.network.inner_steps = 0
    objective(*batch(3), SCALE)  # the fourth batch takes the first batch's slots
    after = objective.network.for_image.sums
    assert (after[:B] == 0).all() and torch.equal(after[B:], before[B:])


def test_own_positives_are_left_out_wherever_they_are_among_the_prototypes():
    objective = NeuCLIP(D, num_prototypes=2 * B, restart="rolling", inner_steps=0, mask_own_positive=True)
    ids = [torch.arange(B), torch.arange(B) + 4]  # samples 4 and 5 come twice
    for step in range(2):
        objective(*batch(step), SCALE, sample_ids=ids[step])
    stored, owners = torch.cat([batch(0)[1], batch(1)[1]]), torch.cat(ids)
    image, text = batch(2)
    asked = torch.tensor([4, 5, 0, 9, 77, 78])
    estimate, _ = objective.log_normalizers(image, text, SCALE, sample_ids=asked)
    want = [log_mean(image[i], text[i], stored[owners != asked[i]], EPS) for i in range(B)]
    assert torch.allclose(estimate, torch.tensor(want, dtype=torch.float64), rtol=1e-12)


def test_without_ids_only_the_batch_that_was_just_stored_can_recognise_its_own():
    masking = NeuCLIP(D, num_prototypes=B, inner_steps=0, restart_every=0, mask_own_positive=True)
    image, text = batch(0)
    value = masking(image, text, SCALE)
    alone = [log_mean(image[i], text[i], text[torch.arange(B) != i], EPS) for i in range(B)]
    assert masking.metrics["mean_log_normalizer_image"] == pytest.approx(sum(alone) / B)
    # Leaving out its own partner, the prediction of a fresh restart is the batch's own normalizer.
    assert torch.allclose(value, CLIP(form="minibatch")(image, text, SCALE))
    plain = NeuCLIP(D, num_prototypes=B, inner_steps=0, restart_every=0)
    plain(image, text, SCALE)
    later = batch(1)
    for one, other in zip(masking.log_normalizers(*later, SCALE), plain.log_normalizers(*later, SCALE), strict=True):
        assert torch.allclose(one, other)


def test_masked_prototypes_have_the_gradient_of_the_masked_mean():
    objective = NeuCLIP(
        D, num_prototypes=B, inner_steps=0, restart_every=0, mask_own_positive=True, mask_duplicates=True
    )
    ids, captions = torch.arange(B), torch.tensor([0, 0, 1, 2, 3, 4])
    objective(*batch(0), SCALE, sample_ids=ids, caption_ids=captions)
    image, text = (x.requires_grad_() for x in batch(1))
    scale = SCALE.clone().requires_grad_()
    got = objective.eval()(image, text, scale, sample_ids=ids + 3, caption_ids=captions)
    no_slot = (ids[:, None] + 3 == ids[None, :]) | (captions[:, None] == captions[None, :])
    no_candidate = captions[:, None] == captions[None, :]
    want = 0
    for anchors, others, rows in ((image, text, batch(0)[1]), (text, image, batch(0)[0])):
        positive = (image * text).sum(1)
        g = masked_mean((anchors @ others.T - positive[:, None]) * scale, no_candidate)
        alpha = torch.log(EPS + masked_mean((anchors @ rows.T - positive[:, None]) * scale, no_slot))
        want = want + ((EPS + g) * torch.exp(-alpha) + alpha).mean() / scale
    want = want + 2 * (RHO - 1) / scale
    assert torch.allclose(got, want)
    inputs = [image, text, scale]
    for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def masked_mean(exponent: Tensor, masked: Tensor) -> Tensor:
    kept = (~masked).double()
    return (exponent.exp() * kept).sum(1) / kept.sum(1)


def test_the_fastclip_temperature_gradient_counts_the_inner_part_twice():
    gradients = {}
    for mode in ("paper", "fastclip"):
        objective = NeuCLIP(D, num_prototypes=4, inner_steps=2, network_lr=0.1, temperature_gradient=mode)
        objective(*batch(0), SCALE)
        image, text = (x.requires_grad_() for x in batch(1))
        scale = SCALE.clone().requires_grad_()
        gradients[mode] = torch.autograd.grad(objective.eval()(image, text, scale), [image, text, scale])
    front, inside = (torch.tensor(TAU, dtype=torch.float64, requires_grad=True) for _ in range(2))
    rows = objective.network.for_image.rows, objective.network.for_text.rows
    # Eq. 12 is tau times a bracket in which tau stands again: apart from each other they can be told apart.
    bracket = contrastive.unified_objective(*batch(1), *rows, inside, rho=RHO, eps=EPS) / inside
    (part,) = torch.autograd.grad(front.detach() * bracket, inside)
    for a, b in zip(gradients["paper"][:2], gradients["fastclip"][:2], strict=True):
        assert torch.equal(a, b)
    difference = gradients["fastclip"][2] - gradients["paper"][2]
    assert torch.allclose(difference, part * -(TAU**2), rtol=1e-9)  # d tau / d scale


@pytest.mark.parametrize("given", [{}, {"network_lr": 0.05, "network_betas": (0.8, 0.98), "network_eps": 1e-2}])
def test_the_simultaneous_update_is_one_adamw_step_that_the_loss_has_not_seen(given):
    objective = NeuCLIP(D, num_prototypes=4, update="simultaneous", network_weight_decay=0.1, **given)
    image, text = batch(0)
    rows = [torch.nn.Parameter(side[[0, 1, 3, 4]].clone()) for side in (text, image)]  # what the first step stores
    betas, eps = given.get("network_betas", (0.9, 0.999)), given.get("network_eps", 1e-8)
    optimizer = torch.optim.AdamW(rows, 1e-3, betas=betas, eps=eps, weight_decay=0.1)
    for step, factor in enumerate([0.5, 1.0, 0.7, 0.1]):
        objective.learning_rate_factor = factor  # a warm-up and a decay
        optimizer.param_groups[0]["lr"] = factor * given.get("network_lr", 1e-3)
        got = objective(*batch(step), SCALE)
        want = contrastive.unified_objective(*batch(step), *rows, 1 / SCALE, rho=RHO, eps=EPS)
        assert torch.allclose(got, want)
        optimizer.zero_grad()
        want.backward()
        optimizer.step()
    assert torch.allclose(objective.network.for_image.rows, rows[0], rtol=1e-9, atol=1e-12)
    assert torch.allclose(objective.network.for_text.rows, rows[1], rtol=1e-9, atol=1e-12)


def test_the_alternating_update_does_not_follow_the_encoders_rate():
    rows = []
    for factor in (1.0, 0.1):
        objective = NeuCLIP(D, num_prototypes=4, inner_steps=2)
        objective.learning_rate_factor = factor
        objective(*batch(0), SCALE)
        rows.append(objective.network.for_image.rows)
    assert torch.equal(*rows)


def test_a_run_gives_algorithm_3_the_encoders_adamw_unless_told_otherwise():
    adamw = OptimizerSettings(learning_rate=3e-4, beta1=0.8, beta2=0.97, eps=1e-5)

    def values(**given):
        settings = NeuCLIPSettings(**given).with_defaults_of(adamw)
        return settings.learning_rate, settings.network_betas, settings.network_eps

    assert values(update="simultaneous") == values(update="simultaneous", network="mlp") == (3e-4, (0.8, 0.97), 1e-5)
    told = {"network_lr": 0.1, "network_betas": (0.5, 0.6), "network_eps": 0.2}
    assert values(update="simultaneous", **told) == (0.1, (0.5, 0.6), 0.2)
    assert values() == (1.0, None, None) and values(network="mlp") == (1e-3, None, None)
    assert values(update="simultaneous", network_optimizer="adagrad") == (1.0, None, None)


def test_the_mlp_is_updated_after_the_gradient_was_prepared_and_does_not_disturb_it():
    """Its weights move in place: the loss needs those it was computed with, in Algorithm 3 and over two batches."""
    objective = NeuCLIP(D, network="mlp", update="simultaneous").double()
    twin = NeuCLIP(D, network="mlp").double().eval()
    for step in range(2):
        twin.load_state_dict(objective.state_dict())
        features = [x.requires_grad_() for x in batch(step)]
        got, want = objective(*features, SCALE), twin(*features, SCALE)
        assert not torch.equal(objective.network.for_image.weights, twin.network.for_image.weights)
        for a, b in zip(torch.autograd.grad(got, features), torch.autograd.grad(want, features), strict=True):
            assert torch.equal(a, b)
    alternating = NeuCLIP(D, network="mlp", inner_steps=1)
    (alternating(*features, SCALE) + alternating(*batch(2), SCALE)).backward()


@pytest.mark.parametrize("fit", ["unified", "separate"])
def test_the_mlp_predicts_a_function_of_the_anchor_minus_its_positive_and_learns_what_it_is_told(fit):
    objective = NeuCLIP(D, network="mlp", fit=fit, inner_steps=0)
    network = objective.network.double()
    image, text = (x.requires_grad_() for x in batch(0))
    scale = SCALE.clone().requires_grad_()
    got = objective(image, text, scale)
    want, positive = 2 * (RHO - 1) / scale, (image * text).sum(1)
    targets = CLIP(form="minibatch").log_normalizers(image, text, scale)
    for anchors, others, mlp in ((image, text, network.for_image), (text, image, network.for_text)):
        g = masked_mean((anchors @ others.T - positive[:, None]) * scale, torch.eye(B, dtype=torch.bool))
        alpha = torch.log(EPS + torch.exp(mlp(anchors) - positive * scale))
        want = want + ((EPS + g) * torch.exp(-alpha) + alpha).mean() / scale
    assert torch.allclose(got, want)
    inputs = [image, text, scale]
    for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)

    def distance() -> float:
        predicted = objective.log_normalizers(image, text, scale)
        return sum((p - t).square().mean().item() for p, t in zip(predicted, targets, strict=True))

    before = distance()
    network.inner_steps = 200
    objective(image, text, scale)
    assert distance() < before / 5


@given(shift=st.floats(-3, 3), seed=st.integers(0, 20))
def test_no_prediction_makes_the_loss_smaller_than_the_exact_one(shift, seed):
    """Eq. 5: the conjugate form lies above the robust loss, and meets it only where every prediction is right."""
    objective = NeuCLIP(D, num_prototypes=5, inner_steps=0)
    objective(*batch(seed + 1), SCALE * math.exp(shift / 3))
    assert objective(*batch(seed), SCALE) >= CLIP(form="minibatch")(*batch(seed), SCALE) - 1e-12


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (NeuCLIP(D, num_prototypes=5).state_dict(), r"shape \(5, 5\), not \(4, 5\)"),
        (NeuCLIP(D, network="mlp").state_dict(), "Missing key"),
        (FastCLIP(7).state_dict(), "Missing key"),
        (CLIP().state_dict(), "Missing key"),
    ],
)
def test_the_state_of_another_objective_is_refused_in_one_line(state, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        NeuCLIP(D, num_prototypes=4).load_state_dict(state)
    assert "not the state of NeuCLIP" in str(refused.value) and "\n" not in str(refused.value)


def test_captions_that_are_all_equal_leave_no_negatives():
    image, text = (x.float().requires_grad_() for x in batch(0))
    same = torch.zeros(B, dtype=torch.int64)
    for objective in (NeuCLIP(D, num_prototypes=B, mask_duplicates=True), CLIP(form="minibatch", mask_duplicates=True)):
        loss = objective(image, text, SCALE.float(), caption_ids=same)
        assert loss.item() == pytest.approx(TAU * 2 * (math.log(1e-6) + RHO), rel=1e-5)
        assert objective.metrics["masked_duplicates"] == B * (B - 1)
        assert all((g == 0).all() for g in torch.autograd.grad(loss, [image, text]))
