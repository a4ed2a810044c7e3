"""SigLIP's bias is built, learned, saved, resumed and exported, other objectives have none; Algorithm 3's AdamW."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from neuclip import api
from neuclip.models import open_clip_module
from neuclip.models.export import export_model
from neuclip.models.towers import build_model
from neuclip.records import RunFolder
from neuclip.runs.build import build_towers
from neuclip.runs.checkpoint import checkpoints_in, load_checkpoint
from neuclip.runs.lifecycle import start_run
from neuclip.settings.objectives import SigLIPSettings
from neuclip.training.loop import train
from tests.runs.conftest import losses


@pytest.fixture
def siglip_settings(small_settings):
    def make(folder, *flags, bias_initial="auto"):
        settings = small_settings(folder, "--objective", "clip", *flags)
        return replace(settings, objective_name="siglip", objective=SigLIPSettings(bias_initial=bias_initial))

    return make


@pytest.mark.slow
def test_a_siglip_run_resumes_to_the_bit_and_exports_its_bias(siglip_settings, tmp_path):
    settings = siglip_settings(
        tmp_path, "--run.name", "run", "--train.samples", "32", "--checkpoint.every_samples", "16"
    )
    folder = RunFolder(api.train(settings))
    whole = load_checkpoint(checkpoints_in(folder.checkpoints)[-1])
    before = losses(folder.path)
    bias = whole["model"]["logit_bias"].item()
    assert bias != pytest.approx(-math.log(7), abs=1e-6)  # it began at auto for a batch of 8, and was learned
    assert open_clip_module().create_model_and_transforms(f"local-dir:{folder.model}")[0].logit_bias.item() == bias
    checkpoints_in(folder.checkpoints)[-1].unlink()
    api.train(settings, resume=folder.path)
    again = load_checkpoint(checkpoints_in(folder.checkpoints)[-1])
    assert losses(folder.path) == before and len(before) == 4
    assert again["model"]["logit_bias"].item() == bias


@pytest.mark.parametrize(("bias_initial", "bias"), [("auto", -math.log(7)), ("-10", -10.0)])
def test_the_bias_starts_where_the_settings_say(siglip_settings, tmp_path, bias_initial, bias):
    towers = build_towers(siglip_settings(tmp_path, bias_initial=bias_initial), torch.device("cpu")).towers
    assert towers.logit_bias.item() == pytest.approx(bias) and towers.logit_bias.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("network", ["prototypes", "mlp"])
def test_algorithm_3_moves_the_network_with_the_encoders_adamw_and_schedule(small_settings, tmp_path, network):
    flags = f"--objective.update simultaneous --objective.network_lr default --objective.network {network}".split()
    flags += ["--optimizer.learning_rate", "0.02", "--optimizer.beta2", "0.9", "--optimizer.eps", "1e-5"]
    run = start_run(small_settings(tmp_path, "--run.name", "run", "--optimizer.warmup", "5", *flags))
    side = run.objective.network.for_image
    assert (side.optimizer.learning_rate, side.optimizer.betas, side.optimizer.eps) == (0.02, (0.9, 0.9), 1e-5)
    train(run, evaluate=lambda run: None, save=lambda run: None)
    assert run.objective.learning_rate_factor == run.optimizer.rate_factor(run.step - 1) < 0.1


def test_a_softmax_objective_has_no_bias_and_leaves_one_that_a_model_brings_alone(small_settings, tmp_path):
    settings = small_settings(tmp_path, "--objective", "clip")
    assert build_towers(settings, torch.device("cpu")).towers.logit_bias is None
    export_model(build_model("tiny", image_size=32, initial_bias=-5.0), tmp_path / "model")
    settings = small_settings(tmp_path, "--objective", "clip", "--model.name", f"local-dir:{tmp_path / 'model'}")
    towers = build_towers(settings, torch.device("cpu")).towers
    assert towers.logit_bias.item() == -5 and not towers.logit_bias.requires_grad
