"""Oracle 5, the schedules, state and the corners: AmorLIP against open_clip, the mini-batch form and a plain twin."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from neuclip.objectives.normalizers.residual_mlp import ResidualMLP
from neuclip.objectives.registry import build_objective
from torch import Tensor, nn

from neuclip import CLIP, AmorLIP
from neuclip.errors import UserError
from neuclip.models import open_clip_module
from neuclip.objectives.amorlip import blend_at, rho_at
from neuclip.objectives.formulas import DIVERGENCES
from neuclip.objectives.objective import NoEstimate
from neuclip.settings.objectives import AmorLIPSettings
from tests.objectives.features import CORNERS, close, corner, unit

B, D = 8, 6
CASES = [(seed, tau) for seed in (0, 1, 2) for tau in (0.01, 0.07, 0.5)]


def inputs(seed: int, tau: float) -> list[Tensor]:
    scale = torch.tensor(1 / tau, dtype=torch.float64)
    return [x.requires_grad_() for x in (unit(B, D, seed=seed), unit(B, D, seed=seed + 100), scale)]


def steps(objective: AmorLIP, which: range, *, size: int = B, scale: float = 10.0) -> list[float]:
    pairs = ((unit(size, D, seed=k), unit(size, D, seed=100 + k)) for k in which)
    return [objective(*pair, torch.tensor(scale, dtype=torch.float64)).item() for pair in pairs]


# The first epoch is mini-batch training.


@pytest.mark.parametrize(("seed", "tau"), CASES)
def test_in_the_first_epoch_with_coefficient_one_features_get_two_tau_times_the_gradient_of_open_clip(seed, tau):
    image, text, scale = inputs(seed, tau)
    got = torch.autograd.grad(AmorLIP(D, positive_coefficient=1.0)(image, text, scale), [image, text])
    want = torch.autograd.grad(open_clip_module().ClipLoss()(image, text, scale), [image, text])
    for a, b in zip(got, want, strict=True):
        assert close(a, 2 * tau * b, 1e-12)


@pytest.mark.parametrize(("seed", "tau"), CASES)
@pytest.mark.parametrize("coefficient", [1e-3, 0.3, 1.0])
def test_in_the_first_epoch_features_get_the_gradient_of_the_minibatch_form(seed, tau, coefficient):
    image, text, scale = inputs(seed, tau)
    minibatch = CLIP(form="minibatch", eps=coefficient / (B - 1))
    got = torch.autograd.grad(AmorLIP(D, positive_coefficient=coefficient)(image, text, scale), [image, text])
    want = torch.autograd.grad(minibatch(image, text, scale), [image, text])
    for a, b in zip(got, want, strict=True):
        assert close(a, b, 1e-12)


# Every step of the method, against a twin made of torch's layers, its Adam, and linear sums.


class Twin:
    """AmorLIP as Section 2.5 of its description has it, step by step, without logarithms of sums or closed forms."""

    def __init__(self, epoch: int, *, adaptive: bool, every: int) -> None:
        self.adaptive, self.every = adaptive, every
        self.start(epoch)
        self.average, self.previous = copy.deepcopy(self.networks), copy.deepcopy(self.networks)
        self.step_count = 0

    def start(self, epoch: int) -> None:
        self.networks = [self.layers(2 * epoch + side) for side in (0, 1)]
        self.adam = torch.optim.Adam([p for n in self.networks for p in n.parameters()], lr=0.01)

    @staticmethod
    def layers(seed: int) -> nn.Module:
        class Layers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.widen = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.LayerNorm(D))
                self.narrow = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.LayerNorm(D))
                self.out = nn.Linear(D, 1)

            def forward(self, x: Tensor) -> Tensor:
                return self.out(torch.relu(self.narrow(self.widen(x)) + x))[:, 0]

        layers = Layers().double()
        nn.utils.vector_to_parameters(ResidualMLP(D, seed=seed).weights.double(), layers.parameters())
        return layers

    def new_epoch(self, epoch: int, anew: bool) -> None:
        self.previous = copy.deepcopy(self.average)
        self.step_count = 0
        if anew:
            self.start(epoch)
            self.average = copy.deepcopy(self.networks)

    def loss(self, image: Tensor, text: Tensor, scale: Tensor, *, blend: float, rho: float, c: float) -> Tensor:
        weight = torch.ones(B, B, dtype=torch.float64).fill_diagonal_(c)
        pair = weight * torch.exp(scale * image @ text.T)
        with torch.no_grad():
            last = [torch.exp(network(x)) for network, x in zip(self.previous, (image, text), strict=True)]
            lam = [blend * p + (1 - blend) * s for p, s in zip(last, (pair.sum(1), pair.sum(0)), strict=True)]
        for _ in range(3):
            outputs = [network(x.detach()) for network, x in zip(self.networks, (image, text), strict=True)]
            self.adam.zero_grad()
            sum((o - s.log()).square().mean() for o, s in zip(outputs, lam, strict=True)).backward()
            nn.utils.clip_grad_norm_([p for n in self.networks for p in n.parameters()], 1.0)
            self.adam.step()
        if self.step_count % self.every == 0:  # steps 0, 2, 4 of each epoch
            for slow, fast in zip(self.average, self.networks, strict=True):
                for a, w in zip(slow.parameters(), fast.parameters(), strict=True):
                    a.data = 0.92 * a.data + 0.08 * w.data
        self.step_count += 1
        positive = (image * text).sum(1).mean()
        j = -2 * scale * positive + (pair / lam[0][:, None]).sum(1).mean() + (pair / lam[1][None, :]).sum(0).mean()
        loss = j / scale.detach() + rho / scale
        if self.adaptive:
            value = -2 * scale * positive + lam[0].log().mean() + lam[1].log().mean() - 2 * math.log(B)
            loss = loss + value.detach() / scale
        return loss


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("reinitialise_every", [0, 1, 2])
def test_loss_gradients_and_networks_follow_the_method_step_by_step_over_four_epochs(adaptive, reinitialise_every):
    objective = AmorLIP(
        D,
        dataset_size=3 * B,
        total_samples=12 * B,
        blend_samples=2 * 3 * B,
        network_lr=0.01,
        positive_coefficient=0.2,
        rho=(5.0, -5.0, -4.0),
        adaptive_temperature=adaptive,
        reinitialise_every=reinitialise_every,
    )
    twin = Twin(0, adaptive=adaptive, every=2)
    blends, rhos = [0.0, 0.4, 0.8, 0.8], [5.0, -5.0, -4.0]
    for step in range(12):
        epoch = step // 3
        if step % 3 == 0 and step:
            twin.new_epoch(epoch, anew=bool(reinitialise_every) and epoch % reinitialise_every == 0)
        given = inputs(step, 0.2)
        got = objective(*given)
        want = twin.loss(*given, blend=blends[epoch], rho=rhos[step // 4], c=0.2)
        assert close(got, want, 1e-9)
        for a, b in zip(torch.autograd.grad(got, given), torch.autograd.grad(want, given), strict=True):
            assert close(a, b, 1e-9)
    for side, sums in enumerate((objective.image_sums, objective.text_sums)):
        for ours, theirs in ((sums.network.weights, twin.networks), (sums.average, twin.average)):
            assert close(ours, nn.utils.parameters_to_vector(theirs[side].parameters()), 1e-8)
        assert close(sums.previous, nn.utils.parameters_to_vector(twin.previous[side].parameters()), 1e-8)


def test_the_blend_rises_by_a_cosine_and_stays():
    got = [blend_at(epoch, 16, 0.8) for epoch in (0, 4, 8, 16, 33)]
    assert got == pytest.approx([0, 0.8 * (1 - math.sqrt(0.5)) / 2, 0.4, 0.8, 0.8])


def test_rho_changes_at_thirds_of_the_run_and_the_last_value_stays():
    assert [rho_at(s, 100, (1.0, 2.0, 3.0)) for s in (0, 33, 34, 66, 67, 99, 100, 1000)] == [1, 1, 2, 2, 3, 3, 3, 3]
    assert rho_at(50, 100, (4.0,)) == 4.0


def test_a_positive_rho_lowers_the_temperature_and_a_negative_one_raises_it():
    gradients = []
    for rho in (0.0, 8.5, -8.5):
        image, text, scale = inputs(0, 0.1)
        gradients.append(torch.autograd.grad(AmorLIP(D, rho=(rho,))(image, text, scale), scale)[0])
    assert gradients[1] < gradients[0] < gradients[2]  # descent on the scale 1 / tau
    assert (gradients[0] - gradients[1]).item() == pytest.approx(8.5 * 0.1**2)


def test_used_alone_half_of_thirty_three_epochs_blend():
    objective = AmorLIP(D)
    assert (objective.epoch_samples, objective.total_samples, objective.blend_epochs) == (1_000_000, 33_000_000, 16.5)


def test_a_run_tells_it_the_size_of_its_data_unless_the_settings_say_how_long_an_epoch_is():
    sizes = {"embed_dim": D, "dataset_size": 500, "total_samples": 4000}
    built = build_objective("amorlip", AmorLIPSettings(), **sizes)
    assert (built.epoch_samples, built.total_samples, built.blend_epochs) == (500, 4000, 4)
    built = build_objective("amorlip", AmorLIPSettings(epoch_samples=100, blend_samples=1000), **sizes)
    assert (built.epoch_samples, built.total_samples, built.blend_epochs) == (100, 4000, 10)


# What the networks minimise.


def shares(values: Tensor) -> list[float]:
    total = sum(math.exp(v) for v in values.tolist())
    return [math.exp(v) / total for v in values.tolist()]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_divergences_compare_each_anchors_share_of_the_batch(name):
    predicted, target = unit(B, seed=0) * 3, unit(B, seed=1) * 3
    p, q = shares(predicted), shares(target)
    half = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    want = {
        "kl_asymmetric": kl(q, p),
        "kl_symmetric": (kl(p, q) + kl(q, p)) / 2,
        "js": (kl(p, half) + kl(q, half)) / 2,
    }[name]
    divergence = DIVERGENCES[name]
    assert divergence(predicted, target).item() == pytest.approx(want, rel=1e-12)
    assert divergence(predicted + 5, target).item() == pytest.approx(want, rel=1e-12)  # a common factor is not seen
    assert divergence(target, target).item() == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("name", ["log_l2", *DIVERGENCES])
def test_the_networks_loss_is_the_named_one_and_falls(name):
    objective = AmorLIP(D, divergence=name, network_lr=0.03).double()
    image, text, scale = (x.detach() for x in inputs(0, 0.2))
    found = []
    for _ in range(25):
        predicted = [objective.image_sums.network(image), objective.text_sums.network(text)]
        objective(image, text, scale)
        found.append(objective.metrics["network_loss"])
        target = torch.logsumexp((image @ text.T * scale).fill_diagonal_(-math.inf), 1)
        target = torch.logaddexp(target, (image * text).sum(1) * scale + math.log(1e-3))
        other = torch.logsumexp((text @ image.T * scale).fill_diagonal_(-math.inf), 1)
        other = torch.logaddexp(other, (image * text).sum(1) * scale + math.log(1e-3))
        squared = sum(((p - t) ** 2).mean() for p, t in zip(predicted, (target, other), strict=True))
        want = squared
        if name != "log_l2":
            want = 0.1 * squared + sum(DIVERGENCES[name](p, t) for p, t in zip(predicted, (target, other), strict=True))
        assert found[-1] == pytest.approx(want.item(), rel=1e-9)
    assert found[-1] < 0.1 * found[0]


# What it answers.


def test_networks_that_are_right_give_the_exact_log_normalizers():
    objective = AmorLIP(D, positive_coefficient=0.5)
    steps(objective, range(1))
    image, text, scale = (x.detach() for x in inputs(0, 0.1))
    similarity = image @ text.T * scale
    weight = torch.ones(B, B, dtype=torch.float64).fill_diagonal_(0.5)
    sums = (weight * similarity.exp()).sum(1).log(), (weight * similarity.exp()).sum(0).log()
    for learnt, exact in zip((objective.image_sums, objective.text_sums), sums, strict=True):
        learnt.predict = lambda features, exact=exact: exact  # type: ignore[method-assign]
    got = objective.log_normalizers(image, text, scale)
    want = CLIP(eps=objective.settings.eps).log_normalizers(image, text, scale)
    for a, b in zip(got, want, strict=True):
        assert close(a, b, 1e-12)


def test_a_network_below_the_own_partners_part_says_that_there_is_nothing_but_eps():
    objective = AmorLIP(D, eps=1e-4)
    steps(objective, range(1))
    for sums in (objective.image_sums, objective.text_sums):
        sums.average.zero_()
        sums.average[-1] = -1000  # the last bias is the output
    image, text, scale = (x.detach() for x in inputs(0, 0.1))
    for answer in objective.log_normalizers(image, text, scale):
        assert torch.allclose(answer, torch.tensor(math.log(1e-4), dtype=torch.float64))
    objective(image, text, scale)
    assert objective.metrics["predicted_at_eps"] == 1


def test_before_anything_is_learnt_it_has_no_estimate():
    image, text, scale = inputs(0, 0.1)
    objective = AmorLIP(D)
    objective.eval()(image, text, scale)
    with pytest.raises(NoEstimate, match="train mode"):
        objective.log_normalizers(image, text, scale)


def test_metrics_tell_calibration_before_the_networks_saw_the_batch():
    objective = AmorLIP(D, network_lr=0.01)
    steps(objective, range(1))
    assert objective.metrics["calibration"] is None
    steps(objective, range(1, 30))
    image, text, scale = (x.detach() for x in inputs(50, 0.1))
    predicted = objective.log_normalizers(image, text, scale)
    truth = CLIP(eps=objective.settings.eps).log_normalizers(image, text, scale)
    objective(image, text, scale)
    want = sum(torch.exp(t - p).mean() for t, p in zip(truth, predicted, strict=True)) / 2
    assert objective.metrics["calibration"] == pytest.approx(want.item(), rel=1e-9)
    assert objective.metrics["blend"] == 0 and objective.metrics["rho"] == 8.5
    batch = CLIP(eps=objective.settings.positive_coefficient / (B - 1)).log_normalizers(image, text, scale)
    for side, values in zip(("image", "text"), batch, strict=True):
        assert objective.metrics[f"mean_log_normalizer_{side}"] == pytest.approx(values.mean().item(), rel=1e-9)


# State.


def test_eval_mode_writes_nothing():
    objective = AmorLIP(D, dataset_size=2 * B)
    steps(objective, range(2))  # the next step in train mode begins an epoch
    before = copy.deepcopy(objective.state_dict())
    objective.eval()
    steps(objective, range(2, 4))
    after = objective.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]


@pytest.mark.parametrize("cut", range(1, 8))
def test_saved_at_any_step_it_continues_to_the_bit(cut):
    settings = {"dataset_size": 3 * B, "total_samples": 9 * B, "divergence": "js"}
    want = steps(AmorLIP(D, **settings), range(9))
    first, second = AmorLIP(D, **settings), AmorLIP(D, seed=4, **settings).double()
    second.settings = replace(second.settings, seed=0)  # of the networks to come; the present ones are in the state
    got = steps(first, range(cut))
    second.load_state_dict(first.state_dict())
    assert got + steps(second, range(cut, 9)) == want


def test_no_outer_optimizer_can_find_the_networks():
    assert list(AmorLIP(D).parameters()) == []


def test_two_seeds_start_from_different_networks_on_every_side_and_in_every_epoch():
    weights = []
    for seed in (0, 1):
        objective = AmorLIP(D, seed=seed, dataset_size=B)
        for epoch in range(2):
            objective._enter_epoch(epoch)
            weights += [objective.image_sums.network.weights.clone(), objective.text_sums.network.weights.clone()]
    assert len({tuple(w.tolist()) for w in weights}) == 8


# Corners.


@pytest.mark.parametrize("tau", [0.005, 0.01, 0.07, 1.0])
@pytest.mark.parametrize("kind", CORNERS)
@pytest.mark.parametrize("size", [1, 2, 6])
def test_loss_gradients_and_state_are_finite_for_every_temperature_and_any_unit_features(tau, kind, size):
    for divergence in ("log_l2", "js"):
        objective = AmorLIP(8, dataset_size=2 * size, total_samples=6 * size, divergence=divergence)
        for _ in range(4):
            image, text = (x.clone().requires_grad_() for x in corner(kind, size))
            scale = torch.tensor(1 / tau, requires_grad=True)
            loss = objective(image, text, scale)
            loss.backward()
            found = [loss, image.grad, text.grad, scale.grad, *objective.buffers()]
            assert all(torch.isfinite(x).all() for x in found)
            assert all(value is None or math.isfinite(value) for value in objective.metrics.values())


def test_the_order_of_the_batch_does_not_matter():
    def run(permutation: Tensor) -> float:
        objective = AmorLIP(D, dataset_size=2 * B, divergence="js")
        for k in range(5):
            image, text = unit(B, D, seed=k)[permutation], unit(B, D, seed=k + 50)[permutation]
            loss = objective(image, text, torch.tensor(10.0, dtype=torch.float64))
        return loss.item()

    generator = torch.Generator().manual_seed(0)
    assert run(torch.arange(B)) == pytest.approx(run(torch.randperm(B, generator=generator)), rel=1e-10)


def test_under_bf16_autocast_it_computes_in_float32():
    def run() -> Tensor:
        objective = AmorLIP(D, dataset_size=B)
        for k in range(3):
            loss = objective(unit(B, D, seed=k).float(), unit(B, D, seed=9 + k).float(), torch.tensor(100.0))
        return loss

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = run()
    assert autocast.dtype == torch.float32 and torch.equal(plain, autocast)


def test_a_step_without_grad_mode_learns_the_same():
    one, other = AmorLIP(D), AmorLIP(D)
    steps(one, range(3))
    with torch.no_grad():
        steps(other, range(3))
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]) if isinstance(value, Tensor) else True


def test_masked_duplicates_vanish_and_the_rest_stands_for_all():
    image, text, scale = inputs(0, 0.1)
    captions = torch.tensor([0, 1, 2, 2, 4, 5, 6, 7])
    got = torch.autograd.grad(
        AmorLIP(D, mask_duplicates=True, rho=(0.0,))(image, text, scale, caption_ids=captions), [image, text, scale]
    )
    same = captions[:, None] == captions[None, :]
    others = (~same).sum(1)
    weight = torch.where(same, 0.0, (B - 1) / others[:, None].double()).fill_diagonal_(
        1e-3
    )  # per anchor, both sides alike
    pair = torch.exp(scale * image @ text.T)
    by_image, by_text = weight * pair, weight * pair.T
    j = -2 * scale * (image * text).sum(1).mean()
    for side in (by_image, by_text):
        j = j + (side / side.sum(1, keepdim=True).detach()).sum(1).mean()
    want = torch.autograd.grad(j / scale.detach(), [image, text, scale])
    for a, b in zip(got, want, strict=True):
        assert close(a, b, 1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rho": ()}, "rho is empty"),
        ({"blend_maximum": 1.0}, "less than 1"),
        ({"average_decay": 1.0}, "less than 1"),
        ({"positive_coefficient": 0.0}, "above 0"),
        ({"network_steps": 0}, "1 or more"),
        ({"average_every": 0}, "1 or more"),
        ({"eps": 0.0}, "above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_remedy(settings, message):
    with pytest.raises(UserError, match=message):
        AmorLIPSettings(**settings)
