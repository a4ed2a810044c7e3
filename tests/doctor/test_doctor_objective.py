"""First loss and size of state, against the objectives themselves."""

from __future__ import annotations

import pytest
import torch
from neuclip.objectives.registry import build_objective

from neuclip.doctor.findings import Findings
from neuclip.doctor.objective import note_objective
from neuclip.doctor.plan import note_plan
from neuclip.models.facts import ModelFacts
from neuclip.settings.reading import read_settings

WIDTH, PAIRS, BATCH = 8, 50, 16
MODEL = ModelFacts(WIDTH, (48, 48), 16, 1000, 4000, 100)
METHODS = [
    "clip",
    "clip --objective.form minibatch",
    "siglip",
    "siglip --objective.bias_initial auto",
    "fastclip",
    "fastclip --objective.variant v0",
    "fastclip --objective.variant v1",
    "fastclip --objective.variant v2",
    "fastclip --objective.variant isogclr --objective.temperature_initial 0.02",
    "amorlip",
    "amorlip --objective.adaptive_temperature true",
    "neuclip",
    "neuclip --objective.rho 3",
]
STATES = [
    "clip",
    "siglip",
    "fastclip",
    "fastclip --objective.variant v2",
    "fastclip --objective.variant isogclr",
    "amorlip --objective.width_factor 0.5",
    "neuclip",
    "neuclip --objective.network_optimizer adam",
    "neuclip --objective.network_optimizer sgd",
    "neuclip --objective.network mlp",
    "neuclip --objective.mask_own_positive true",
]


def settings_for(method: str, *more: str):
    flags = ["--train.batch_size", str(BATCH), "--train.samples", "800"]
    return read_settings(None, [*flags, "--objective", *method.split(), *more])


def build(settings):
    objective = build_objective(
        settings.objective_name, settings.objective, embed_dim=WIDTH, dataset_size=PAIRS, total_samples=800
    )
    return objective.double()


def loss_at_equal_similarities(settings, objective):
    """With all similarities equal, and 0."""
    image, text = torch.eye(WIDTH, dtype=torch.float64)[:2, None].expand(2, BATCH, WIDTH)
    scale = torch.tensor(1 / settings.temperature.initial, dtype=torch.float64)
    bias = None
    if settings.objective.uses_bias:
        bias = torch.tensor(settings.objective.initial_bias(BATCH), dtype=torch.float64)
    return objective(image, text, scale, bias, sample_ids=torch.arange(BATCH)).item()


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_at_chance_is_that_of_equal_similarities(method):
    settings = settings_for(method)
    chance = settings.objective.loss_at_chance(BATCH, settings.temperature.initial)
    assert chance == pytest.approx(loss_at_equal_similarities(settings, build(settings)), abs=1e-9)


@pytest.mark.parametrize("method", STATES)
def test_the_state_has_the_predicted_size(method):
    settings = settings_for(method)
    objective = build(settings)
    loss_at_equal_similarities(settings, objective)
    tensors = [value for value in objective.state_dict().values() if isinstance(value, torch.Tensor)]
    numbers = sum(value.numel() for value in tensors)
    predicted = settings.objective.state_bytes(WIDTH, PAIRS)
    owners = 16 * settings.objective.num_prototypes if "own_positive" in method else 0  # two int64 per slot
    counters = 2 * getattr(settings.objective, "num_prototypes", 1)  # of Adam's updates
    assert 0 <= numbers - owners / 8 - (predicted - owners) / 4 <= counters


def remedies(method: str, pairs: int, *more: str) -> list[str]:
    findings, settings = Findings(), settings_for(method, *more)
    findings.note("plan", pairs_per_epoch=pairs)
    note_plan(findings, settings, pairs, ranks=1)
    note_objective(findings, settings, MODEL, pairs, ranks=1)
    return [advice.remedy for advice in findings.warnings]


def test_a_sane_run_of_any_method_has_no_warnings():
    more = ["--train.samples", "16000"]
    for method in ("clip", "siglip", "fastclip", "amorlip", "neuclip --objective.num_prototypes 64"):
        assert remedies(method, 4000, *more, *(["--objective.restart_every", "10"] if "neu" in method else [])) == []


def test_a_run_too_short_for_a_method_has_a_warning_with_a_remedy():
    assert "--objective neuclip" in remedies("fastclip", 4000)[1]  # after: the run sees part of the data
    assert "--objective.epoch_samples 80" in remedies("amorlip", 4000)[1]
    seldom = "neuclip --objective.num_prototypes 64 --objective.restart_every 500"
    assert remedies(seldom, 800) == ["give --objective.restart_every 4"]
    assert "--objective.num_prototypes" in remedies("neuclip --objective.num_prototypes 3000", 800)[0]


@pytest.mark.parametrize("method", ["clip", "siglip", "fastclip", "amorlip", "neuclip"])
def test_ages_of_averages_and_prototypes_are_noted_for_every_method(method):
    findings, settings = Findings(), settings_for(method)
    findings.note("plan", pairs_per_epoch=400)
    note_plan(findings, settings, 400, ranks=1)
    note_objective(findings, settings, MODEL, 400, ranks=1)
    assert (findings["fastclip.steps_between_visits"], findings["fastclip.visits_per_pair"]) == (25, 2)
    prototypes = getattr(settings.objective, "num_prototypes", 4096)
    assert (findings["neuclip.prototypes"], findings["neuclip.steps_to_fill"]) == (prototypes, -(-prototypes // BATCH))
    assert (
        findings["objective.first_loss_from"] < findings["objective.first_loss"] < findings["objective.first_loss_to"]
    )


def test_rho_is_measured_by_the_batch_in_the_minibatch_form_and_by_the_data_elsewhere():
    form = "clip --objective.form minibatch --objective.rho"
    assert remedies(f"{form} 2.8", 800) == ["give --objective.rho 1.9"]  # log 15 = 2.7
    assert remedies(f"{form} 2.6", 800) == []
    of_data = "neuclip --objective.num_prototypes 16 --objective.restart_every 9 --objective.rho 6.7"
    assert remedies(of_data, 800) == ["give --objective.rho 4.7"]  # log 799 = 6.68
    assert remedies(of_data, 900) == ["give --train.samples 912 for one epoch"]  # 57 whole batches
