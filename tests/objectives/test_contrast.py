"""log g against its twin: the same numbers written plainly, differentiated by autograd in float64. And its memory."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip import CLIP, AmorLIP, FastCLIP, NeuCLIP, SigLIP
from neuclip.objectives import pairs as strips_of_pairs
from neuclip.objectives.contrast import contrast
from neuclip.objectives.pairs import Pairs, gather_pairs
from tests.objectives.features import B, D, close, number, same_gradients, unit
from tests.references import contrastive

SAMPLES = torch.tensor([0, 1, 2, 3, 0, 5])  # a sample twice
CAPTIONS = torch.tensor([0, 1, 1, 3, 4, 1])  # and a caption three times
WEIGHTS = unit(2, B, seed=3)


def leaves() -> tuple[Tensor, Tensor]:
    return unit(B, D, seed=1).requires_grad_(), unit(B, D, seed=2).requires_grad_()


def pairs_of(image: Tensor, text: Tensor, masked: bool = False) -> Pairs:
    keys = {"sample_ids": SAMPLES, "caption_ids": CAPTIONS} if masked else {}
    return gather_pairs(image, text, dtype=torch.float64, valid=torch.tensor(True), **keys)


def negatives(masked: bool) -> Tensor:  # (B, B) bool
    same = torch.eye(B, dtype=torch.bool)
    if masked:
        same = same | (SAMPLES[:, None] == SAMPLES) | (CAPTIONS[:, None] == CAPTIONS)
    return ~same


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tau", [0.05, 0.5, "individual"])
def test_log_g_and_every_gradient_equal_those_of_the_twin(tau, masked, strips):
    image, text = leaves()
    tau = (0.05 + unit(2, B, seed=5).abs()).requires_grad_() if tau == "individual" else number(tau)
    got = contrast(pairs_of(image, text, masked), tau).log_g
    want = contrastive.log_g(image, text, tau.expand(2, B), negatives(masked))
    assert close(got, want, 1e-12)
    assert same_gradients((got * WEIGHTS).sum(), (want * WEIGHTS).sum(), [image, text, tau], 1e-11)


@pytest.mark.parametrize("masked", [False, True])
def test_mean_excess_is_the_derivative_by_the_inverse_temperature_and_accuracy_the_share_of_nearest(masked, strips):
    image, text = leaves()
    inverse = (2 + unit(2, B, seed=5).abs()).requires_grad_()
    batch = contrast(pairs_of(image, text, masked), 1 / inverse)
    (slope,) = torch.autograd.grad(contrastive.log_g(image, text, 1 / inverse, negatives(masked)).sum(), inverse)
    assert close(batch.mean_excess, slope, 1e-12) and not batch.mean_excess.requires_grad
    nearer = unit(B, D, seed=2) + unit(B, D, seed=1) * torch.linspace(0, 1, B, dtype=torch.float64)[:, None]
    nearer = nearer / nearer.norm(dim=1, keepdim=True)
    batch = contrast(pairs_of(image, nearer, masked), number(0.2))
    similarity = (image @ nearer.T).masked_fill(~negatives(masked) & ~torch.eye(B, dtype=torch.bool), -9)
    share = (similarity.argmax(dim=1) == torch.arange(B)).double().mean()
    assert 0 < share < 1 and batch.accuracy == share


def test_one_frozen_side_leaves_the_gradient_of_the_other_as_it_is(strips):
    image, text = leaves()
    tau = number(0.2)
    (both,) = torch.autograd.grad((contrast(pairs_of(image, text), tau).log_g * WEIGHTS).sum(), text)
    frozen = (contrast(pairs_of(image.detach(), text), tau.detach()).log_g * WEIGHTS).sum()
    assert torch.equal(torch.autograd.grad(frozen, text)[0], both)


def test_without_grad_mode_the_value_is_the_same(strips):
    image, text = leaves()
    want = contrast(pairs_of(image, text), number(0.2)).log_g
    with torch.no_grad():
        got = contrast(pairs_of(image, text), number(0.2)).log_g
    assert torch.equal(got, want.detach()) and not got.requires_grad


def test_two_losses_of_one_batch_can_be_differentiated_in_turn(strips):
    """What is kept for a backward pass is freed after it, and computed again for the next."""
    image, text = leaves()
    batch = contrast(pairs_of(image, text), number(0.2))
    first = torch.autograd.grad(batch.log_g.sum(), [image, text], retain_graph=True)
    second = torch.autograd.grad(batch.log_g.sum(), [image, text])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("case", ["one pair", "equal captions"])
def test_an_anchor_without_negatives_has_no_normalizer_and_no_gradient(case):
    size, keys = (1, {}) if case == "one pair" else (3, {"caption_ids": torch.zeros(3, dtype=torch.int64)})
    image, text, tau = unit(size, D, seed=0).requires_grad_(), unit(size, D, seed=1).requires_grad_(), number(0.1)
    log_g = contrast(gather_pairs(image, text, dtype=torch.float64, valid=torch.tensor(True), **keys), tau).log_g
    assert (log_g == -math.inf).all()
    floor, masked = 2 * 0.1 * math.log(1e-6), {"mask_duplicates": True}
    wanted = {CLIP(**masked): 0.0, CLIP(form="minibatch", rho=0.0, **masked): floor}
    for objective, want in (wanted | {NeuCLIP(D, num_prototypes=size, rho=0.0, **masked): floor}).items():
        loss = objective(image, text, 1 / tau, **keys)
        assert loss.item() == pytest.approx(want, rel=1e-5)
        assert objective.metrics["masked_duplicates"] == size * (size - 1)
        assert all((slope == 0).all() for slope in torch.autograd.grad(loss, [image, text]))


def test_float32_stays_finite_where_the_normalizer_itself_overflows():
    near = torch.eye(4)[:2].requires_grad_()
    far = -near  # s_ii = -1, s_ij = 0: g = exp(100)
    batch = contrast(gather_pairs(near, far, dtype=torch.float32, valid=torch.tensor(True)), torch.tensor(0.01))
    batch.log_g.sum().backward()
    assert torch.allclose(batch.log_g, torch.tensor(100.0)) and torch.isfinite(near.grad).all()


class Live(TorchDispatchMode):
    """The most bytes that tensors made inside have held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self.held:
                self.held.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage.data_ptr(), storage.nbytes())
        return made

    def free(self, place: int, size: int) -> None:
        self.held.discard(place)
        self.now -= size


def peak_of(objective, size: int) -> int:
    """Bytes of one call and its gradients, beyond the features and the state."""
    image, text = (unit(size, D, seed=k).float().requires_grad_() for k in (0, 1))
    scale, bias = torch.tensor(14.0, requires_grad=True), torch.tensor(-9.0, requires_grad=True)
    with Live() as live:
        objective(image, text, scale, bias, sample_ids=torch.arange(size)).backward()
    return live.peak


def test_the_meter_sees_what_is_alive_at_a_time_and_a_whole_matrix_where_there_is_one():
    assert peak_of(CLIP(), 512) > 4 * 512 * 512
    with Live() as live:
        for _ in range(3):
            torch.ones(1000).add(1)
    assert live.peak == 2 * 4000 and live.now == 0


def test_similarities_of_both_sides_are_kept_up_to_so_many_numbers_and_computed_again_beyond(monkeypatch):
    both = 2 * 128 * 128
    monkeypatch.setattr(strips_of_pairs, "STRIP", {"cpu": 4 * 2 * 128})
    monkeypatch.setattr(strips_of_pairs, "KEPT", both)
    assert peak_of(CLIP(), 128) > 4 * both
    monkeypatch.setattr(strips_of_pairs, "KEPT", both - 1)
    assert peak_of(CLIP(), 128) < 4 * both / 2


@pytest.mark.parametrize(
    "build",
    [
        CLIP,
        lambda: CLIP(form="minibatch"),
        SigLIP,
        lambda: FastCLIP(512),
        lambda: FastCLIP(512, temperature="individual"),
        lambda: AmorLIP(D),
        lambda: NeuCLIP(D, num_prototypes=64, inner_steps=2),
        lambda: NeuCLIP(D, network="mlp", inner_steps=1),
    ],
    ids=["clip", "mini-batch form", "siglip", "fastclip", "individual", "amorlip", "neuclip", "mlp"],
)
def test_memory_grows_with_the_batch_not_with_its_square(build, monkeypatch):
    monkeypatch.setattr(strips_of_pairs, "STRIP", {"cpu": 2**13})
    monkeypatch.setattr(strips_of_pairs, "KEPT", 0)
    small, large = peak_of(build(), 128), peak_of(build(), 512)
    assert large < 5 * small and large < 2 * 512 * 512  # half of one matrix of similarities
