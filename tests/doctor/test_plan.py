"""doctor and training agree on what follows from the settings, and doctor warns where it makes no sense."""

from __future__ import annotations

import math

import pytest
import torch

from neuclip.doctor import plan
from neuclip.doctor.findings import Findings
from neuclip.doctor.plan import note_batch_size, note_loading, note_plan, note_storing, note_temperature, note_warmup
from neuclip.doctor.probe import SampleProbe
from neuclip.doctor.resources import note_device
from neuclip.machine import choose_device, choose_precision
from neuclip.models.facts import ModelFacts
from neuclip.settings.reading import read_settings

BATCH_NORM = ModelFacts(128, (48, 48), 16, 1000, 4000, 100, batch_norm=True)


def plan_of(flags: str, ranks: int = 1, pairs: int = 1000) -> Findings:
    settings = read_settings(None, ["--train.batch_size", "10", "--train.samples", "1000", *flags.split()])
    findings = Findings()
    findings.note("plan", pairs_per_epoch=pairs)
    note_plan(findings, settings, pairs, ranks)
    note_batch_size(findings, settings, BATCH_NORM, pairs)
    note_device(findings, settings)
    note_loading(findings, settings, SampleProbe())
    note_warmup(findings)
    note_temperature(findings, settings, findings["plan.steps"])
    return findings


@pytest.mark.parametrize(
    ("warmup", "steps", "warned"),
    [(0, 0, False), (0.05, 5, False), (0.5, 50, False), (0.6, 60, True), (1, 1, False), (500, 500, True)],
)
def test_a_warm_up_of_most_of_the_run_is_warned_of(warmup, steps, warned):
    findings = plan_of(f"--optimizer.warmup {warmup} --temperature.learning_rate 0")
    assert findings["plan.warmup_steps"] == steps
    assert bool(findings.warnings) == warned


@pytest.mark.parametrize(("local", "micro"), [(8, 3), (128, 48), (3, 2), (7, 7), (5, 9), (17, 16), (4, 1)])
def test_a_forward_pass_of_one_pair_is_a_problem_where_training_would_have_one(local, micro):
    findings = plan_of(f"--train.batch_size {local} --train.micro_batch_size {micro}")
    chunks = torch.zeros(local).tensor_split(math.ceil(local / micro))  # as training/accumulation.py
    assert findings.ready == (min(map(len, chunks)) > 1)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("mps", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
def test_auto_is_the_device_and_the_precision_that_training_chooses(ranks, cuda, mps, bf16, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    findings = plan_of("", ranks=ranks)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))  # as torchrun starts training
    device = choose_device("auto")
    assert findings["memory.device"] == device.type == ("cuda" if cuda else "mps" if mps and ranks == 1 else "cpu")
    assert f"torch.{findings['memory.precision']}" == str(choose_precision("auto", device))


def test_several_ranks_cannot_share_mps(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert plan_of("--run.device mps").ready
    [problem] = plan_of("--run.device mps", ranks=2).problems
    assert "run.device mps is not available" in problem.what and "--run.device cpu" in problem.remedy


def test_cores_are_counted_over_all_ranks(monkeypatch):
    monkeypatch.setattr(plan, "available_cores", lambda: 8)
    for ranks, workers, warned in ((1, 8, False), (1, 9, True), (5, 1, False), (5, 2, True)):
        advice = [what for what, _, _ in plan_of(f"--data.workers {workers}", ranks=ranks).warnings if "cores" in what]
        assert bool(advice) == warned
        assert all(f"if all {ranks} ranks are on this machine" in what for what in advice if ranks > 1)


def test_a_temperature_that_cannot_move_is_warned_of():
    slow = plan_of("--temperature.learning_rate 1e-4")
    assert slow["temperature.lowest_in_reach"] == pytest.approx(0.07 * math.exp(-0.01))
    assert slow.warnings[0].remedy == "give --temperature.learning_rate 0.015"
    assert plan_of("--temperature.learning_rate 0").warnings == []
    assert plan_of("--temperature.learning_rate 0.1")["temperature.lowest_in_reach"] == 0.01


@pytest.mark.parametrize(
    ("flags", "stored", "remedy"),
    [
        ("", [], ""),
        ("--model.text_tower locked", ["text"], ""),
        ("--model.text_tower locked --train.samples 100", [], ""),
        ("--model.text_tower locked --model.text_unlocked_layers 1", [], ""),
        ("--model.image_tower locked", [], "give --data.crop_scale 1,1 to"),
        ("--model.image_tower locked --data.crop_scale 1,1", ["image"], ""),
        ("--model.image_tower lora --data.crop_scale 1,1", [], ""),
        ("--model.text_tower locked --data.stored_features off", [], "give --data.stored_features auto to"),
    ],
)
def test_a_locked_tower_whose_features_could_be_stored_is_pointed_out(flags, stored, remedy):
    findings = Findings()
    findings.note("plan", pairs_per_epoch=100)
    note_storing(findings, read_settings(None, ["--train.batch_size", "10", "--train.samples", "500", *flags.split()]))
    assert findings["plan.stored_features"] == stored
    assert [remedy in warning.remedy for warning in findings.warnings] == [True] * bool(remedy)
