"""NeuCLIP is Algorithm 1: against a twin of autograd and torch.optim, central differences, and its options by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from neuclip import CLIP, NeuCLIP
from neuclip.settings.objectives import NeuCLIPSettings
from tests.objectives.features import close, number, same_gradients, unit
from tests.references import contrastive
from tests.references.residual_mlp import ResidualMLP

B, D, M = 6, 5, 4
TAU = 0.2
RHO, EPS = NeuCLIPSettings.rho, NeuCLIPSettings.eps
SCALE = torch.tensor(1 / TAU, dtype=torch.float64)


def batch(step: int) -> tuple[Tensor, Tensor]:
    return unit(B, D, seed=step).requires_grad_(), unit(B, D, seed=1000 + step).requires_grad_()


def rows(objective: NeuCLIP) -> Tensor:  # (2, m, d)
    return objective.state_dict()["normalizer.rows"]


def by_hand(anchor: Tensor, partner: Tensor, candidates: Tensor, eps: float = EPS) -> float:
    """log(eps + mean exp((cos - positive) / tau)) over the rows of `candidates`."""
    cosines = [(anchor @ row / row.norm()).item() for row in candidates]
    return contrastive.log_mean_exp([(cosine - (anchor @ partner).item()) / TAU for cosine in cosines], eps)


# Algorithms 1 and 3, whole.


@pytest.mark.filterwarnings("ignore:logit_scale is 2")
@pytest.mark.parametrize("eps", [1e-14, 1e-6, 1e-2])
@pytest.mark.parametrize(("seed", "tau"), [(0, 0.07), (1, 0.5)])
@pytest.mark.parametrize("changes", [{}, {"alpha_gradient": "detached"}, {"fit": "separate"}], ids=str)
def test_losses_gradients_and_prototypes_are_those_of_algorithm_1_over_restarts(changes, seed, tau, eps):
    given = {"restart_every": 2, "inner_steps": 3, "rho": 3.0, "eps": eps}
    objective = NeuCLIP(D, num_prototypes=M, network_lr=0.1, **given, **changes)
    twin = contrastive.Algorithm1(M, rate=0.1, **given)
    twin.detach_alpha, twin.fit = objective.alpha_gradient == "detached", objective.fit
    for step in range(5):
        leaves = [*batch(10 * seed + step), number(1 / tau)]
        got, want = objective(*leaves), twin.loss(*leaves[:2], 1 / leaves[2])
        assert close(got, want, 1e-8) and same_gradients(got, want, leaves, 1e-7)
    assert close(rows(objective), twin.rows.detach(), 1e-7)


@pytest.mark.parametrize("rate", [None, 0.05])
def test_the_simultaneous_update_is_one_adam_step_that_the_loss_has_not_seen(rate):
    objective = NeuCLIP(D, num_prototypes=M, update="simultaneous", network_lr=rate)
    twin = contrastive.Algorithm1(M, restart_every=0, inner_steps=0, rate=rate or 1e-3, rho=RHO, eps=EPS)
    twin.simultaneous = True
    for step in range(5):
        leaves = [*batch(step), number(1 / TAU)]
        got, want = objective(*leaves), twin.loss(*leaves[:2], 1 / leaves[2])
        assert close(got, want, 1e-11) and same_gradients(got, want, leaves, 1e-10)
    assert close(rows(objective), twin.rows.detach(), 1e-9)


def test_by_default_it_has_the_papers_numbers():
    objective = NeuCLIP(D)
    assert (objective.num_prototypes, objective.restart_every, objective.inner_steps) == (4096, 500, 10)
    twin = contrastive.Algorithm1(M, restart_every=0, inner_steps=10, rate=1.0, rho=6.5, eps=1e-6)
    leaves = [*batch(0), number(1 / TAU)]
    assert close(NeuCLIP(D, num_prototypes=M)(*leaves), twin.loss(*leaves[:2], 1 / leaves[2]), 1e-9)


# What it answers.


@pytest.mark.parametrize("eps", [None, 1e-9, 0.5])
def test_an_estimate_is_the_mean_over_the_prototypes(eps):
    objective = NeuCLIP(D, num_prototypes=M, inner_steps=2, network_lr=0.1)
    objective(*batch(0), SCALE)
    image, text = batch(1)
    for_image, for_text = rows(objective)
    found = objective.log_normalizers(image, text, SCALE, eps=eps)
    floor = EPS if eps is None else eps
    want = [[by_hand(image[i], text[i], for_image, floor) for i in range(B)]]
    want += [[by_hand(text[i], image[i], for_text, floor) for i in range(B)]]
    assert close(torch.stack(found), torch.tensor(want, dtype=torch.float64), 1e-12)


def test_in_eval_mode_without_prototypes_it_uses_the_batch():
    objective, leaves = NeuCLIP(D, num_prototypes=M).eval(), [*batch(0), number(1 / TAU)]
    assert close(objective(*leaves), CLIP(form="minibatch")(*leaves), 1e-13)


# Numbers that float32 cannot hold.


def test_capped_anchors_and_those_at_eps_are_counted():
    objective, hot = NeuCLIP(3, num_prototypes=2, inner_steps=0, restart_every=0, eps=0.0), torch.eye(3)
    objective(hot[[0, 1]], hot[[0, 1]], torch.tensor(100.0))  # prototypes: axes 0 and 1
    image, text = hot[[2, 2]], torch.stack([hot[0], hot[2]])  # image 0 finds text 1, text 1 image 0, but no prototype
    loss = objective(image, text, torch.tensor(100.0))
    assert torch.isfinite(loss) and objective.metrics["capped"] == 2 and objective.metrics["share_at_eps"] == 0
    floored = NeuCLIP(3, num_prototypes=2, inner_steps=0)
    floored(hot[[0, 1]], hot[[0, 1]], torch.tensor(100.0))  # g = exp(-100), far below eps
    assert floored.metrics["share_at_eps"] == 1 and floored.metrics["capped"] == 0


# Options.


def test_own_positives_are_left_out_wherever_they_are_among_the_prototypes():
    objective = NeuCLIP(D, num_prototypes=2 * B, restart="rolling", inner_steps=0, mask_own_positive=True)
    ids = [torch.arange(B), torch.arange(B) + 4]  # samples 4 and 5 come twice
    for step in range(2):
        objective(*batch(step), SCALE, sample_ids=ids[step])
    stored, owners = torch.cat([batch(0)[1], batch(1)[1]]), torch.cat(ids)
    (image, text), asked = batch(2), torch.tensor([4, 5, 0, 9, 77, 78])
    estimate, _ = objective.log_normalizers(image, text, SCALE, sample_ids=asked)
    want = [by_hand(image[i], text[i], stored[owners != asked[i]]) for i in range(B)]
    assert close(estimate, torch.tensor(want, dtype=torch.float64), 1e-12)


def test_without_ids_only_the_batch_that_was_just_stored_can_recognise_its_own():
    masking = NeuCLIP(D, num_prototypes=B, inner_steps=0, restart_every=0, mask_own_positive=True)
    # Leaving out its own partner, the prediction of a fresh restart is the batch's own normalizer.
    assert close(masking(*batch(0), SCALE), CLIP(form="minibatch")(*batch(0), SCALE), 1e-12)
    plain = NeuCLIP(D, num_prototypes=B, inner_steps=0, restart_every=0)
    plain(*batch(0), SCALE)
    answers = [torch.stack(objective.log_normalizers(*batch(1), SCALE)) for objective in (masking, plain)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("own", [False, True])
def test_masked_prototypes_have_the_gradient_of_the_masked_mean(own):
    objective = NeuCLIP(D, num_prototypes=B, inner_steps=0, mask_own_positive=own, mask_duplicates=not own)
    ids, captions = torch.arange(B), torch.tensor([0, 0, 1, 2, 3, 4])
    objective(*batch(0), SCALE, sample_ids=ids, caption_ids=captions)
    leaves = [*batch(1), number(1 / TAU)]
    got = objective.eval()(*leaves, sample_ids=ids + 3, caption_ids=captions)
    same_caption = captions[:, None] == captions
    candidates = ids[:, None] + 3 != ids  # masking captions masks the sample itself too
    want = contrastive.unified_objective(
        *leaves[:2],
        rows(objective),
        1 / leaves[2],
        rho=RHO,
        eps=EPS,
        negatives=~torch.eye(B, dtype=torch.bool) if own else ~same_caption,
        candidates=candidates if own else candidates & ~same_caption,
    )
    assert close(got, want, 1e-12) and same_gradients(got, want, leaves, 1e-11)


# The ablation with an MLP.


@pytest.mark.parametrize("fit", ["unified", "separate"])
@pytest.mark.parametrize("update", ["alternating", "simultaneous"])
def test_the_mlp_predicts_from_the_anchor_minus_its_positive_and_learns_by_adam(fit, update):
    objective = NeuCLIP(D, network="mlp", fit=fit, update=update, inner_steps=2, network_lr=0.01).double()
    networks = [ResidualMLP(side) for side in objective.state_dict()["normalizer.weights"]]
    adam = torch.optim.Adam([p for network in networks for p in network.parameters()], lr=0.01)

    def terms(image: Tensor, text: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        g = contrastive.log_g(image, text, (1 / scale).expand(2, B), ~torch.eye(B, dtype=torch.bool)).exp()
        outputs = torch.stack([network(x) for network, x in zip(networks, (image, text), strict=True)])
        return EPS + g, torch.log(EPS + torch.exp(outputs - (image * text).sum(1) * scale))

    def learn(leaves: list[Tensor], steps: int) -> None:
        for _ in range(steps):
            adam.zero_grad()
            normalizer, alpha = terms(*(x.detach() for x in leaves))
            unified = TAU * (normalizer * torch.exp(-alpha) + alpha)
            (unified if fit == "unified" else (alpha - normalizer.log()).square() / 2).mean(dim=1).sum().backward()
            adam.step()

    for step in range(3):
        leaves = [*batch(step), number(1 / TAU)]
        got = objective(*leaves)  # the weights move in place: the loss keeps those it was computed with
        if update == "alternating":
            learn(leaves, 2)
        normalizer, alpha = terms(*leaves)
        want = ((normalizer * torch.exp(-alpha) + alpha).mean(dim=1).sum() + 2 * (RHO - 1)) / leaves[2]
        assert close(got, want, 1e-9) and same_gradients(got, want, leaves, 1e-8)
        if update == "simultaneous":
            learn(leaves, 1)
    for side, network in zip(objective.state_dict()["normalizer.weights"], networks, strict=True):
        assert close(side, nn.utils.parameters_to_vector(network.parameters()), 1e-9)


def test_gradients_of_two_batches_can_wait_for_one_backward_pass():
    objective = NeuCLIP(D, network="mlp", inner_steps=1)
    (objective(*batch(0), SCALE) + objective(*batch(1), SCALE)).backward()
