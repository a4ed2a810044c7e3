"""Oracle 3: SigLIP is open_clip's loss and the closed form, bias included."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from neuclip import SigLIP
from neuclip.errors import UserError
from neuclip.models import open_clip_module
from neuclip.objectives import siglip
from neuclip.objectives.objective import NoEstimate
from neuclip.settings.objectives import SigLIPSettings
from tests.objectives.features import CORNERS, corner


def inputs(seed: int = 0, size: int = 8, *, tau: float = 0.1, bias: float = -10.0, dtype=torch.float64):
    """Image rows, text rows, logit scale, bias; all leaves."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, size, 6, generator=generator, dtype=dtype)
    scalars = [torch.tensor(1 / tau, dtype=dtype), torch.tensor(bias, dtype=dtype)]
    return [x.requires_grad_() for x in (*F.normalize(rows, dim=2), *scalars)]


def value_and_gradients(loss, leaves):
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def assert_equal(got, want, tolerance=1e-12):
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("tau", [0.01, 0.07, 0.5])
@pytest.mark.parametrize("bias", [-10.0, 0.3])
def test_siglip_equals_open_clips_loss_in_value_and_every_gradient(seed, tau, bias):
    leaves = inputs(seed, tau=tau, bias=bias)
    want = open_clip_module().loss.SigLipLoss()(*leaves)
    assert_equal(value_and_gradients(SigLIP()(*leaves), leaves), value_and_gradients(want, leaves))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("tau", [0.01, 0.07, 0.5])
def test_siglip_equals_the_double_loop_and_its_closed_form(seed, tau):
    leaves = inputs(seed, tau=tau)
    image, text, scale, bias = (x.detach() for x in leaves)
    size, s = len(image), (image @ text.T).tolist()
    value, slope = 0.0, torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        for j in range(size):
            z = 1 if i == j else -1
            wrong = -z * (s[i][j] / tau + bias.item())
            value += (max(wrong, 0) + math.log1p(math.exp(-abs(wrong)))) / size
            slope[i, j] = -z / (1 + math.exp(-wrong)) / size
    want = [
        torch.tensor(value, dtype=torch.float64),
        scale * slope @ text,
        scale * slope.T @ image,
        (slope * torch.tensor(s, dtype=torch.float64)).sum(),
        slope.sum(),
    ]
    assert_equal(value_and_gradients(SigLIP()(*leaves), leaves), want)


@pytest.mark.parametrize("elements", [1, 8, 24, 10_000])
def test_the_size_of_a_chunk_changes_nothing(elements, monkeypatch):
    leaves = inputs(size=7)
    want = value_and_gradients(SigLIP()(*leaves), leaves)
    monkeypatch.setattr(siglip, "CHUNK_ELEMENTS", elements)
    assert_equal(value_and_gradients(SigLIP()(*leaves), leaves), want)


def test_no_matrix_of_the_whole_batch_outlives_a_chunk(monkeypatch):
    monkeypatch.setattr(siglip, "CHUNK_ELEMENTS", 64)
    largest = []
    original = F.logsigmoid
    monkeypatch.setattr(siglip.F, "logsigmoid", lambda x: largest.append(x.numel()) or original(x))
    leaves = inputs(size=32)
    SigLIP()(*leaves).backward()
    assert len(largest) == 2 * 16 and max(largest) == 64


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_of_one_or_two_is_no_special_case(size):
    leaves = inputs(size=size)
    want = open_clip_module().loss.SigLipLoss()(*leaves)
    assert_equal(value_and_gradients(SigLIP()(*leaves), leaves), value_and_gradients(want, leaves))


@pytest.mark.parametrize("tau", [0.005, 0.01, 0.07, 1.0])
@pytest.mark.parametrize("kind", CORNERS)
def test_value_gradients_and_metrics_are_finite_at_every_temperature(tau, kind):
    image, text = (x.clone().requires_grad_() for x in corner(kind, size=6))
    _, _, scale, bias = inputs(tau=tau, dtype=torch.float32)
    objective = SigLIP()
    objective(image, text, scale, bias).backward()
    assert all(torch.isfinite(x.grad).all() for x in (image, text, scale, bias))
    assert all(math.isfinite(value) for value in objective.metrics.values() if value is not None)


def test_equal_samples_and_masked_captions_are_no_negatives():
    leaves = inputs(size=4)
    image, text, scale, bias = leaves
    ids, captions = torch.tensor([5, 6, 7, 5]), torch.tensor([1, 2, 2, 3])
    got = SigLIP(mask_duplicates=True)(*leaves, sample_ids=ids, caption_ids=captions)
    counted = ~((ids[:, None] == ids) | (captions[:, None] == captions)) | torch.eye(4, dtype=torch.bool)
    signs = 2 * torch.eye(4, dtype=torch.float64) - 1
    want = -(F.logsigmoid(signs * (scale * image @ text.T + bias)) * counted).sum() / 4
    assert_equal(value_and_gradients(got, leaves), value_and_gradients(want, leaves))
    ids_alone = SigLIP()(*leaves, sample_ids=ids, caption_ids=captions)
    assert not torch.allclose(ids_alone, got) and not torch.allclose(ids_alone, SigLIP()(*leaves))


def test_without_gradient_the_value_is_the_same_and_eval_mode_writes_nothing():
    leaves = inputs()
    objective = SigLIP().eval()
    with torch.no_grad():
        value = objective(*leaves)
    assert not value.requires_grad and torch.equal(value, objective(*leaves).detach())
    assert list(objective.parameters()) == [] and objective.state_dict() == {}


def test_under_autocast_the_loss_stays_in_float32():
    leaves = inputs(size=16, dtype=torch.float32)
    want = SigLIP()(*leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = SigLIP()(*leaves)
    assert got.dtype == torch.float32 and torch.equal(got, want)


def test_a_frozen_tower_or_bias_needs_no_gradient():
    image, text, scale, bias = inputs()
    SigLIP()(image.detach(), text, scale, bias.detach()).backward()
    assert text.grad is not None and scale.grad is not None


def test_the_metrics_are_the_means_they_are_named_after():
    leaves = inputs()
    objective = SigLIP()
    objective(*leaves)
    image, text, scale, bias = (x.detach() for x in leaves)
    logits = scale * image @ text.T + bias
    off_diagonal = ~torch.eye(8, dtype=torch.bool)
    metrics = objective.metrics
    assert metrics["calibration"] is None and metrics["bias"] == -10
    assert metrics["accuracy"] == pytest.approx((logits.argmax(dim=1) == torch.arange(8)).double().mean().item())
    assert metrics["positive_logit"] == pytest.approx(logits.diagonal().mean().item())
    assert metrics["negative_logit"] == pytest.approx(logits[off_diagonal].mean().item())


def test_a_missing_bias_is_an_error_that_says_where_to_get_one():
    with pytest.raises(ValueError, match=r"logit_bias=model\.logit_bias.*init_logit_bias=-10"):
        SigLIP()(*inputs()[:3])


def test_there_is_no_normalizer_to_ask_for():
    with pytest.raises(NoEstimate):
        SigLIP().log_normalizers(*inputs()[:3])


def test_the_initial_bias_is_a_number_or_follows_from_the_batch():
    assert SigLIPSettings().initial_bias(1024) == -10
    assert SigLIPSettings(bias_initial="auto").initial_bias(1024) == pytest.approx(-math.log(1023))
    assert SigLIPSettings(bias_initial="auto").initial_bias(1) == 0


@pytest.mark.parametrize("wrong", ["atuo", "nan", "", "1e999"])
def test_another_initial_bias_is_refused(wrong):
    with pytest.raises(UserError, match="give auto or a number"):
        SigLIPSettings(bias_initial=wrong)
