"""AmorLIP and the small networks: against open_clip, the mini-batch form, torch's layers and a twin step by step."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from neuclip import CLIP, AmorLIP
from neuclip.models import open_clip_module
from neuclip.objectives import build_objective, mlp
from neuclip.settings.objectives import AmorLIPSettings
from tests.objectives.features import close, number, same_gradients, unit
from tests.references.residual_mlp import ResidualMLP

B, D = 8, 6
CASES = [(seed, tau) for seed in (0, 1, 2) for tau in (0.01, 0.07, 0.15)]


def inputs(seed: int, tau: float) -> list[Tensor]:
    return [unit(B, D, seed=seed).requires_grad_(), unit(B, D, seed=seed + 100).requires_grad_(), number(1 / tau)]


def steps(objective: AmorLIP, which: range) -> list[float]:
    return [objective(*inputs(step, 0.1)).item() for step in which]


def weights(objective: AmorLIP, name: str) -> Tensor:  # (2, w)
    return objective.state_dict()[name]


# The first epoch is mini-batch training.


@pytest.mark.parametrize(("seed", "tau"), CASES)
@pytest.mark.parametrize("coefficient", [1e-3, 0.3, 1.0])
def test_in_the_first_epoch_features_get_the_gradient_of_the_minibatch_form(seed, tau, coefficient):
    image, text, scale = inputs(seed, tau)
    objective = AmorLIP(D, positive_coefficient=coefficient)
    want = CLIP(form="minibatch", eps=coefficient / (B - 1))(image, text, scale)
    assert same_gradients(objective(image, text, scale), want, [image, text], 1e-12)
    if coefficient == 1:
        want = 2 * tau * open_clip_module().ClipLoss()(image, text, scale)
        assert same_gradients(objective(image, text, scale), want, [image, text], 1e-12)


# Every step of the method, against a twin made of torch's layers, its Adam, and linear sums.


class Twin:
    """AmorLIP step by step, without logarithms of sums or closed forms. `fresh(epoch)` draws new networks."""

    def __init__(self, fresh) -> None:
        self.fresh = fresh
        self.start(0)
        self.average, self.previous = copy.deepcopy(self.networks), copy.deepcopy(self.networks)
        self.step_count = 0

    def start(self, epoch: int) -> None:
        self.networks = [ResidualMLP(side) for side in self.fresh(epoch)]
        self.adam = torch.optim.Adam([p for n in self.networks for p in n.parameters()], lr=0.01)

    def new_epoch(self, epoch: int, anew: bool) -> None:
        self.previous = copy.deepcopy(self.average)
        self.step_count = 0
        if anew:
            self.start(epoch)
            self.average = copy.deepcopy(self.networks)

    def loss(self, image: Tensor, text: Tensor, scale: Tensor, weight: Tensor, *, blend: float, rho: float) -> Tensor:
        """`weight` (B, B) is symmetric, but for what a row divides by: c for the pair itself, 0 for what is masked."""
        pair = torch.exp(scale * image @ text.T)
        sides = weight * pair, weight * pair.T
        with torch.no_grad():
            last = [torch.exp(network(x)) for network, x in zip(self.previous, (image, text), strict=True)]
            lam = [blend * p + (1 - blend) * s.sum(1) for p, s in zip(last, sides, strict=True)]
        self.losses = []
        for _ in range(3):
            outputs = [network(x.detach()) for network, x in zip(self.networks, (image, text), strict=True)]
            self.adam.zero_grad()
            self.losses.append(sum((o - s.log()).square().mean() for o, s in zip(outputs, lam, strict=True)))
            self.losses[-1].backward()
            nn.utils.clip_grad_norm_([p for n in self.networks for p in n.parameters()], 1.0)
            self.adam.step()
        if self.step_count % 2 == 0:  # steps 0, 2, 4 of each epoch
            for slow, fast in zip(self.average, self.networks, strict=True):
                for a, w in zip(slow.parameters(), fast.parameters(), strict=True):
                    a.data = 0.92 * a.data + 0.08 * w.data
        self.step_count += 1
        ratios = sum((side / total[:, None]).sum(1).mean() for side, total in zip(sides, lam, strict=True))
        return (ratios - 2 * scale * (image * text).sum(1).mean()) / scale.detach() + rho / scale


@pytest.mark.parametrize(
    ("anew", "chunk", "captions"), [(True, 4096, range(B)), (False, 3, range(B)), (True, 3, [0, 1, 2, 2, 4, 5, 6, 2])]
)
def test_loss_gradients_and_networks_follow_the_method_step_by_step_over_four_epochs(
    anew, chunk, captions, monkeypatch
):
    monkeypatch.setattr(mlp, "ROWS", chunk)
    captions = torch.tensor(captions)
    same = captions[:, None] == captions  # masked ones vanish, and the rest stands for all
    weight = torch.where(same, 0.0, (B - 1) / (~same).sum(1, keepdim=True).double()).fill_diagonal_(0.2)
    given = {"dataset_size": 3 * B, "total_samples": 12 * B, "blend_samples": 2 * 3 * B, "network_lr": 0.01}
    given |= {"positive_coefficient": 0.2, "rho": (5.0, -5.0, -4.0), "reinitialise": anew, "mask_duplicates": True}
    objective = AmorLIP(D, **given)

    still, drawn = AmorLIP(D, **given | {"network_lr": 1e-30}), []  # whose networks stay as each epoch draws them
    for step in range(12):
        steps(still, range(step, step + 1))
        drawn += [weights(still, "networks.weights").clone()] if step % 3 == 0 else []
    assert len({tuple(side[:9].tolist()) for epoch in drawn for side in epoch}) == (8 if anew else 2)
    twin = Twin(drawn.__getitem__)
    blends, rhos = [0.0, 0.4, 0.8, 0.8], [5.0, -5.0, -4.0]  # of each epoch; of each third of the run
    for step in range(12):
        epoch = step // 3
        if step % 3 == 0 and step:
            twin.new_epoch(epoch, anew)
        leaves = inputs(step, 0.2)
        got = objective(*leaves, caption_ids=captions)
        want = twin.loss(*leaves, weight, blend=blends[epoch], rho=rhos[step // 4])
        assert close(got, want, 1e-9) and same_gradients(got, want, leaves, 1e-9)
        metrics = objective.metrics
        assert metrics["blend"] == pytest.approx(blends[epoch]) and metrics["rho"] == rhos[step // 4]
        assert metrics["network_loss"] == pytest.approx(twin.losses[0].item(), rel=1e-8)
    for name, theirs in (("networks.weights", twin.networks), ("average", twin.average), ("previous", twin.previous)):
        for side, network in zip(weights(objective, name), theirs, strict=True):
            assert close(side, nn.utils.parameters_to_vector(network.parameters()), 1e-8)


@pytest.mark.parametrize(
    ("given", "known", "epochs", "blends"),
    [
        ({}, {"dataset_size": 2 * B, "total_samples": 16 * B}, [0, 0, 1, 1, 2], 4),
        ({"epoch_samples": B}, {"dataset_size": 99 * B, "total_samples": 8 * B}, [0, 1, 2, 3, 4], 4),
        ({"blend_samples": 8 * B}, {"dataset_size": B, "total_samples": 99 * B}, [0, 1, 2, 3, 4], 8),
        ({}, {"dataset_size": B, "total_samples": 0}, [0, 1, 2, 3, 4], 16.5),  # used alone: half of 33 epochs
    ],
)
def test_epochs_and_the_blend_follow_from_the_data_and_the_run_by_default(given, known, epochs, blends):
    objective = build_objective("amorlip", AmorLIPSettings(**given), embed_dim=D, **known)
    for step, epoch in enumerate(epochs):
        steps(objective, range(step, step + 1))
        assert objective.epoch == epoch
        assert objective.metrics["blend"] == pytest.approx(0.4 * (1 - math.cos(math.pi * min(epoch / blends, 1))))


# The networks.


def test_their_first_weights_are_drawn_as_torchs_and_leave_torchs_generator_alone():
    before = torch.get_rng_state()
    drawn = weights(AmorLIP(D), "networks.weights")
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(drawn, weights(AmorLIP(D), "networks.weights"))
    assert not torch.equal(drawn[0], drawn[1])
    for side in weights(AmorLIP(40), "networks.weights"):
        parts = side.split([1600, 40, 40, 40, 1600, 40, 40, 40, 40, 1])
        for place, part in enumerate(parts):
            if place in (2, 3, 6, 7):  # scale and shift of a LayerNorm
                assert torch.equal(part, torch.full((40,), 1.0 if place in (2, 6) else 0.0))
            elif len(part) > 1:
                assert 0.8 / math.sqrt(40) < part.abs().max() <= 1 / math.sqrt(40) and part.mean().abs() < 0.06


# What it answers.


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("shift", [0.0, -1000.0])  # networks that are far too low say that there is nothing but eps
def test_an_estimate_is_that_of_the_averaged_networks_without_the_positive_pair(eps, shift):
    objective = AmorLIP(D, positive_coefficient=0.5, network_lr=0.01)
    steps(objective, range(5))
    state = objective.state_dict()
    state["average"][:, -1] += shift  # the last bias is added to the output
    objective.load_state_dict(state)
    image, text, scale = (x.detach() for x in inputs(9, 0.1))
    positive = (image * text).sum(1) * scale
    found = objective.log_normalizers(image, text, scale, eps=eps)
    for side, features, got in zip(weights(objective, "average"), (image, text), found, strict=True):
        others = (ResidualMLP(side)(features) - positive).exp() - 0.5
        want = torch.log(eps + others.clamp(min=0) / (B - 1))
        assert close(got, want, 1e-9) and (others > 0).any() == (shift == 0)
