"""Oracle 2: CLIP is open_clip's loss, and the mini-batch form at eps = 1/(B-1)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from neuclip import CLIP, NeuCLIP
from neuclip.models import open_clip_module


def features(seed: int, size: int = 8, width: int = 6):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, size, width, generator=generator, dtype=torch.float64)
    return [F.normalize(x, dim=1).requires_grad_() for x in rows]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("tau", [0.01, 0.07, 0.5])
def test_clip_equals_open_clips_loss_in_value_and_gradient(seed, tau):
    reference = open_clip_module().ClipLoss()
    inputs = [*features(seed), torch.tensor(1 / tau, dtype=torch.float64, requires_grad=True)]
    got, want = CLIP()(*inputs), reference(*inputs)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clip_is_the_mini_batch_form_at_eps_one_over_the_others(seed):
    image, text = features(seed)
    scale = torch.tensor(1 / 0.07, dtype=torch.float64)
    others = len(image) - 1
    log_normalizers = CLIP(eps=1 / others).log_normalizers(image, text, scale)
    mini_batch = sum(side.mean() for side in log_normalizers) / 2 + math.log(others)
    assert torch.allclose(CLIP()(image, text, scale), mini_batch, rtol=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_mini_batch_form_is_two_tau_clip_at_eps_one_over_the_others(seed):
    inputs = [*features(seed), torch.tensor(1 / 0.07, dtype=torch.float64)]
    others = len(inputs[0]) - 1
    got = CLIP(form="minibatch", rho=0.0, eps=1 / others)(*inputs)
    want = 2 * 0.07 * (CLIP()(*inputs) - math.log(others))
    assert torch.allclose(got, want, rtol=1e-12)
    for a, b in zip(torch.autograd.grad(got, inputs[:2]), torch.autograd.grad(want, inputs[:2]), strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-13)


def test_the_mini_batch_form_is_what_neuclip_minimises_where_its_prediction_is_the_batch():
    inputs = [*features(4), torch.tensor(1 / 0.07, dtype=torch.float64, requires_grad=True)]
    got = CLIP(form="minibatch", rho=3.0)(*inputs)
    want = NeuCLIP(6, rho=3.0).eval()(*inputs)  # without prototypes it takes the batch's own normalizers
    assert torch.allclose(got, want, rtol=1e-12)
    for a, b in zip(torch.autograd.grad(got, inputs[:2]), torch.autograd.grad(want, inputs[:2]), strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-13)


def test_open_clips_trainer_gets_its_dict():
    image, text = features(0)
    answer = CLIP()(image, text, torch.tensor(10.0), output_dict=True)
    assert set(answer) == {"contrastive_loss"}


def test_a_sample_drawn_twice_is_not_its_own_wrong_answer():
    image, text = features(0, size=3)
    twice = [torch.cat([x, x[:1]]) for x in (image, text)]
    scale = torch.tensor(10.0, dtype=torch.float64)
    with_ids = CLIP()(*twice, scale, sample_ids=torch.tensor([5, 6, 7, 5]))
    # By hand: rows 0 and 3 see themselves and the two others; rows 1 and 2 see all four.
    logits = scale * twice[0] @ twice[1].T
    logits[0, 3] = logits[3, 0] = -math.inf
    by_hand = (F.cross_entropy(logits, torch.arange(4)) + F.cross_entropy(logits.T, torch.arange(4))) / 2
    assert torch.allclose(with_ids, by_hand)
    assert not torch.allclose(with_ids, CLIP()(*twice, scale))
