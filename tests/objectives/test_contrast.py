"""The closed form against its twin: the same scalars written plainly, differentiated by autograd in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from neuclip import CLIP, AmorLIP, FastCLIP, NeuCLIP, SigLIP
from neuclip.objectives.contrast import candidate_sum, mean_normalizer_ratio
from neuclip.objectives.pairs import Both, Pairs, gather_pairs
from tests.objectives.features import close, unit

B, D = 7, 5
SAMPLES = torch.tensor([0, 1, 2, 3, 0, 5, 6])  # a sample twice
CAPTIONS = torch.tensor([0, 1, 1, 3, 4, 5, 1])  # and a caption three times


def leaves(tau: float) -> tuple[Tensor, Tensor, Tensor]:
    image, text = unit(B, D, seed=1), unit(B, D, seed=2)
    return tuple(x.requires_grad_() for x in (image, text, torch.tensor(tau, dtype=torch.float64)))


def pairs_of(image: Tensor, text: Tensor, masked: bool) -> Pairs:
    keys = {"sample_ids": SAMPLES, "caption_ids": CAPTIONS} if masked else {}
    return gather_pairs(image, text, dtype=torch.float64, **keys)


def allowed(masked: bool) -> Tensor:  # (B, B) bool
    same = torch.eye(B, dtype=torch.bool)
    if masked:
        same = same | (SAMPLES[:, None] == SAMPLES) | (CAPTIONS[:, None] == CAPTIONS)
    return ~same


def twin(image: Tensor, text: Tensor, taus: Both, offsets: Both, masked: bool, *, relative: bool) -> Tensor:
    """sum_j exp(s_ij / tau_i - offset_i) over the negatives, the mean over anchors of both sides; with `relative` the
    mean over negatives of exp((s_ij - s_ii) / tau_i - offset_i)."""
    total = torch.zeros((), dtype=torch.float64)
    positive, keep = (image * text).sum(dim=1), allowed(masked)
    for similarity, tau, offset in zip((image @ text.T, text @ image.T), taus, offsets, strict=True):
        tau = tau.expand(B)
        for i in range(B):
            excess = similarity[i] - positive[i] if relative else similarity[i]
            terms = torch.exp(excess / tau[i] - offset[i].detach())[keep[i]]
            total = total + (terms.mean() if relative else terms.sum()) / B
    return total


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tau", [0.05, 0.5])
@pytest.mark.parametrize("relative", [False, True])
def test_value_and_every_gradient_equal_those_of_autograd(relative, tau, masked):
    image, text, temperature = leaves(tau)
    offsets = (3 * unit(B, seed=3), 3 * unit(B, seed=4))
    function = mean_normalizer_ratio if relative else candidate_sum
    got = function(pairs_of(image, text, masked), temperature, offsets)
    want = twin(image, text, (temperature, temperature), offsets, masked, relative=relative)
    assert close(got, want, 1e-12)
    inputs = [image, text, temperature]
    for mine, autograds in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True):
        assert close(mine, autograds, 1e-11)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("relative", [False, True])
def test_with_one_constant_temperature_per_sample_and_side_too(relative, masked):
    image, text, _ = leaves(0.1)
    offsets = (3 * unit(B, seed=3), 3 * unit(B, seed=4))
    taus = (0.05 + unit(B, seed=5).abs(), 0.05 + unit(B, seed=6).abs())
    function = mean_normalizer_ratio if relative else candidate_sum
    got = function(pairs_of(image, text, masked), taus, offsets)
    want = twin(image, text, taus, offsets, masked, relative=relative)
    assert close(got, want, 1e-12)
    for mine, autograds in zip(
        torch.autograd.grad(got, [image, text]), torch.autograd.grad(want, [image, text]), strict=True
    ):
        assert close(mine, autograds, 1e-11)


def test_one_frozen_side_leaves_the_gradient_of_the_other_as_it_is():
    image, text, tau = leaves(0.2)
    offsets = (unit(B, seed=3), unit(B, seed=4))
    (both,) = torch.autograd.grad(mean_normalizer_ratio(pairs_of(image, text, False), tau, offsets), text)
    frozen = mean_normalizer_ratio(pairs_of(image.detach(), text, False), tau.detach(), offsets)
    assert torch.equal(torch.autograd.grad(frozen, text)[0], both)


def test_without_grad_mode_the_value_is_the_same():
    image, text, tau = leaves(0.2)
    offsets = (unit(B, seed=3), unit(B, seed=4))
    want = mean_normalizer_ratio(pairs_of(image, text, False), tau, offsets)
    with torch.no_grad():
        got = mean_normalizer_ratio(pairs_of(image, text, False), tau, offsets)
    assert torch.equal(got, want.detach()) and not got.requires_grad


@pytest.mark.parametrize(
    "objective",
    [
        CLIP(),
        CLIP(form="minibatch"),
        SigLIP(),
        *(FastCLIP(B, variant=variant) for variant in ("v0", "v1", "v2", "v3")),
        AmorLIP(D),
        NeuCLIP(D, num_prototypes=4),
        NeuCLIP(D, num_prototypes=4, alpha_gradient="detached"),
        NeuCLIP(D, network="mlp"),
    ],
    ids=lambda objective: type(objective).__name__,
)
@pytest.mark.parametrize("which", [0, 1])
def test_a_second_derivative_is_an_error_instead_of_a_wrong_number(objective, which):
    image, text, scale = leaves(5.0)
    loss = objective(image, text, scale, torch.tensor(-10.0, dtype=torch.float64), sample_ids=torch.arange(B))
    plain = torch.autograd.grad(loss, [image, text], retain_graph=True)
    gradients = torch.autograd.grad(loss, [image, text], create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))
    for differentiated in (image, text):
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(gradients[which].square().sum(), differentiated, retain_graph=True)
