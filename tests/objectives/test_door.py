"""How an objective is built and called: what it refuses, in which type it computes, and what it shows of itself."""

from __future__ import annotations

import pytest
import torch

from neuclip import CLIP, FastCLIP, NeuCLIP, SigLIP, objectives
from neuclip.objectives import build_objective
from neuclip.settings.objectives import FastCLIPSettings, NeuCLIPSettings
from tests.objectives.features import B, D, N, unit

IDS = torch.arange(B)


def call(objective, *, image=None, text=None, scale=10.0, **keys):
    image = unit(B, D, seed=0) if image is None else image
    return objective(image, unit(B, D, seed=1) if text is None else text, torch.as_tensor(scale), **keys)


# Building it.


def test_a_run_builds_it_from_settings_and_what_it_knows():
    known = {"embed_dim": D, "dataset_size": 7, "epoch_samples": 9, "total_samples": 100}
    neuclip = build_objective("neuclip", NeuCLIPSettings(rho=3.0), **known)
    fastclip = build_objective("fastclip", FastCLIPSettings(gamma=0.5), **known)
    assert isinstance(neuclip, NeuCLIP) and (neuclip.embed_dim, neuclip.rho) == (D, 3.0)
    assert (fastclip.dataset_size, fastclip.epoch_samples, fastclip.total_samples, fastclip.gamma) == (7, 9, 100, 0.5)


# Calling it.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": torch.ones(B, D)}, r"image features are not unit rows \(length off by 1.83\); .*normalize"),
        ({"text": 1.05 * unit(B, D, seed=0)}, "text features are not unit rows"),
        ({"text": unit(3, D, seed=0)}, r"shapes \(6, 8\) and \(3, 8\); give two matrices of one shape"),
        ({"image": unit(B, seed=0), "text": unit(B, seed=0)}, "give two matrices"),
        ({"image": unit(B, 9, seed=0), "text": unit(B, 9, seed=0)}, "9 columns; .* was made with embed_dim=8"),
        ({"scale": 0.0}, r"logit_scale is 0; give 1/tau, which is positive: logit_scale.exp\(\)"),
        ({"scale": -3.0}, "logit_scale is -3; give 1/tau"),
        ({"scale": torch.ones(2)}, r"logit_scale has shape \(2,\); give one number"),
        ({"sample_ids": torch.arange(B + 1)}, r"sample_ids have shape \(7,\) .* give 6 integers, one per pair"),
        ({"sample_ids": torch.zeros(B)}, "torch.float32; give 6 integers"),
        ({"sample_ids": torch.zeros(B, dtype=torch.bool)}, "torch.bool; give 6 integers"),
        ({"caption_ids": torch.zeros(B, 1, dtype=torch.int64)}, "caption_ids have shape .* give 6 integers"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_right_are_refused_and_change_nothing(given, message):
    objective = NeuCLIP(D, num_prototypes=4)
    with pytest.raises(ValueError, match=message):
        call(objective, **given)
    assert objective.steps == 0 and not objective.normalizer.ready


def test_lengths_that_rounding_to_bf16_leaves_are_unit_rows():
    call(CLIP(), image=1.015 * unit(B, D, seed=0))


@pytest.mark.parametrize(
    "ids", [IDS.tolist(), IDS.int(), IDS.to(torch.uint8), IDS.numpy()], ids=lambda x: type(x).__name__
)
def test_ids_may_be_a_list_or_any_kind_of_integers(ids):
    want = call(FastCLIP(N, mask_duplicates=True), sample_ids=IDS, caption_ids=IDS % 2)
    assert torch.equal(call(FastCLIP(N, mask_duplicates=True), sample_ids=ids, caption_ids=(IDS % 2).tolist()), want)


def test_a_scale_may_be_a_number_or_have_one_element():
    want = call(CLIP(), scale=10.0)
    assert torch.equal(CLIP()(unit(B, D, seed=0), unit(B, D, seed=1), 10.0), want)
    assert torch.equal(call(CLIP(), scale=torch.tensor([10.0])).squeeze(), want)


def test_open_clips_trainer_gets_its_dict():
    assert torch.equal(call(CLIP(), output_dict=True)["contrastive_loss"], call(CLIP()))


def test_without_masking_captions_do_not_count_but_samples_do():
    ids = torch.tensor([5, 6, 7, 5, 8, 9])
    assert torch.equal(call(CLIP(), caption_ids=ids), call(CLIP()))
    assert torch.equal(call(CLIP(), sample_ids=ids), call(CLIP(mask_duplicates=True), caption_ids=ids))


def test_siglip_says_where_to_get_the_bias_it_lacks():
    with pytest.raises(ValueError, match=r"logit_bias=model\.logit_bias.*init_logit_bias=-10"):
        call(SigLIP())


def test_the_docstring_says_that_activation_checkpointing_would_call_it_twice():
    assert "activation checkpointing" in objectives.Objective.__doc__
