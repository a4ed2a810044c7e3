"""CLIP and SigLIP are open_clip's losses and their closed forms; the mini-batch form is Eq. 1."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip import CLIP, SigLIP
from neuclip.models import open_clip_module
from tests.objectives.features import B, D, close, number, same_gradients, unit
from tests.references import contrastive

cases = pytest.mark.parametrize(("seed", "tau"), [(seed, tau) for seed in (0, 1, 2) for tau in (0.01, 0.07, 0.15)])
IDS, CAPTIONS = torch.tensor([5, 6, 7, 5]), torch.tensor([1, 2, 2, 3])  # of four pairs
NEGATIVES = (IDS[:, None] != IDS) & (CAPTIONS[:, None] != CAPTIONS)
OWN = torch.eye(4, dtype=torch.bool)


def inputs(seed: int = 0, *, tau: float = 0.1, bias: float | None = None, size: int = B) -> list[Tensor]:
    """Image rows, text rows, logit scale and, if given, bias; all leaves."""
    rows = [unit(size, D, seed=2 * seed).requires_grad_(), unit(size, D, seed=2 * seed + 1).requires_grad_()]
    return [*rows, number(1 / tau), *([] if bias is None else [number(bias)])]


def assert_equal(got: Tensor, want: Tensor, leaves: list[Tensor], tolerance: float = 1e-12) -> None:
    assert close(got, want, tolerance) and same_gradients(got, want, leaves, tolerance)


@cases
def test_clip_equals_open_clips_loss_in_value_and_every_gradient(seed, tau):
    leaves = inputs(seed, tau=tau)
    assert_equal(CLIP()(*leaves), open_clip_module().ClipLoss()(*leaves), leaves)


def test_clips_small_losses_keep_their_digits():
    """Each anchor's is log(1 + exp(-1/tau)): in plain cross-entropy the difference of two numbers near 1/tau."""
    hot = torch.eye(2, dtype=torch.float64)
    assert CLIP()(hot, hot, torch.tensor(30.0)).item() == pytest.approx(math.log1p(math.exp(-30)), rel=1e-13)


@cases
def test_the_mini_batch_form_is_eq_1_of_the_batch(seed, tau):
    leaves = inputs(seed, tau=tau)
    g = contrastive.log_g(*leaves[:2], (1 / leaves[2]).expand(2, B), ~torch.eye(B, dtype=torch.bool)).exp()
    want = (torch.log(1e-3 + g).mean(dim=1).sum() + 2 * 3.0) / leaves[2]
    assert_equal(CLIP(form="minibatch", rho=3.0, eps=1e-3)(*leaves), want, leaves, 1e-11)


def test_the_mini_batch_form_is_two_tau_clip_at_eps_one_over_the_others():
    leaves = inputs(tau=0.07)
    got = CLIP(form="minibatch", rho=0.0, eps=1 / (B - 1))(*leaves)
    assert_equal(got, 2 * 0.07 * (CLIP()(*leaves) - math.log(B - 1)), leaves[:2])
    estimates = CLIP(eps=1 / (B - 1)).log_normalizers(*leaves)
    assert close(sum(side.mean() for side in estimates) / 2 + math.log(B - 1), CLIP()(*leaves), 1e-12)


@pytest.mark.parametrize("form", ["openclip", "minibatch"])
def test_samples_drawn_twice_and_masked_captions_are_no_wrong_answers(form):
    image, text, scale = leaves = inputs(size=4)
    if form == "minibatch":
        g = contrastive.log_g(image, text, (1 / scale).expand(2, 4), NEGATIVES).exp()
        want = (torch.log(1e-6 + g).mean(dim=1).sum() + 2 * 6.5) / scale
    else:
        logits = (scale * image @ text.T).masked_fill(~NEGATIVES & ~OWN, -math.inf)
        want = (F.cross_entropy(logits, torch.arange(4)) + F.cross_entropy(logits.T, torch.arange(4))) / 2
    objective = CLIP(form=form, mask_duplicates=True)
    assert_equal(objective(*leaves, sample_ids=IDS, caption_ids=CAPTIONS), want, leaves, 1e-11)
    nearest = (image @ text.T).masked_fill(~NEGATIVES & ~OWN, -9).argmax(dim=1)
    assert objective.metrics["accuracy"] == (nearest == torch.arange(4)).double().mean()
    assert objective.metrics["masked_duplicates"] == 4


@pytest.mark.parametrize("bias", [-10.0, 0.3])
@pytest.mark.parametrize(("size", "tau"), [(1, 0.1), (2, 0.01), (B, 0.07), (B, 0.15)])
def test_siglip_equals_open_clips_loss_in_value_and_every_gradient(size, tau, bias):
    leaves = inputs(size=size, tau=tau, bias=bias)
    assert_equal(SigLIP()(*leaves), open_clip_module().loss.SigLipLoss()(*leaves), leaves)


def test_for_siglip_equal_samples_and_masked_captions_are_no_negatives():
    image, text, scale, bias = leaves = inputs(size=4, bias=0.5)
    signs = 2 * torch.eye(4, dtype=torch.float64) - 1
    want = -(F.logsigmoid(signs * (scale * image @ text.T + bias)) * (NEGATIVES | OWN)).sum() / 4
    assert_equal(SigLIP(mask_duplicates=True)(*leaves, sample_ids=IDS, caption_ids=CAPTIONS), want, leaves)
    ids_alone = SigLIP()(*leaves, sample_ids=IDS, caption_ids=CAPTIONS)
    assert not torch.allclose(ids_alone, want) and not torch.allclose(ids_alone, SigLIP()(*leaves))


def test_metrics_are_the_means_they_are_named_after():
    image, text, scale, bias = leaves = inputs(bias=-10.0)
    text.data += image.data * torch.arange(B)[:, None] / B  # so that some find their partner
    text.data /= text.data.norm(dim=1, keepdim=True)
    logits = (scale * image @ text.T + bias).detach()
    right = (logits.argmax(dim=1) == torch.arange(B)).double().mean().item()
    siglip, clip = SigLIP(), CLIP()
    siglip(*leaves), clip(*leaves[:3])
    bias.data.fill_(3.0)  # as an optimizer does: what is recorded is the step's
    assert 0 < right < 1 and clip.metrics["accuracy"] == pytest.approx(right) == siglip.metrics["accuracy"]
    assert clip.metrics["calibration"] is None and siglip.metrics["calibration"] is None
    negatives = logits[~torch.eye(B, dtype=torch.bool)]
    assert siglip.metrics["bias"] == -10
    assert siglip.metrics["positive_logit"] == pytest.approx(logits.diagonal().mean().item())
    assert siglip.metrics["negative_loss"] == pytest.approx(F.softplus(negatives).sum().item() / B)


@pytest.mark.parametrize("build", [CLIP, SigLIP])
def test_a_partner_as_near_as_the_nearest_other_counts_as_right(build):
    """Pairs 0 and 1 are equal: each partner ties with another's."""
    rows, objective = torch.eye(3)[[0, 0, 1, 2]], build()
    objective(rows, rows[[0, 1, 3, 2]], torch.tensor(10.0), torch.tensor(-10.0))
    assert objective.metrics["accuracy"] == 0.5
