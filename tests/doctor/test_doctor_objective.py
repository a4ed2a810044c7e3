"""What doctor says of a method: the size of its state, how old it gets, and what the run should change."""

from __future__ import annotations

import pytest
import torch

from neuclip.doctor.findings import Findings
from neuclip.doctor.objective import note_objective
from neuclip.doctor.plan import note_plan
from neuclip.models.facts import ModelFacts
from neuclip.objectives import build_objective
from neuclip.settings.reading import read_settings

WIDTH, PAIRS, BATCH = 8, 50, 16
MODEL = ModelFacts(WIDTH, (48, 48), 16, 1000, 4000, 100)
METHODS = [
    "clip",
    "siglip",
    "fastclip",
    "fastclip --objective.temperature individual",
    "amorlip",
    "neuclip",
    "neuclip --objective.update simultaneous",
    "neuclip --objective.network mlp",
    "neuclip --objective.mask_own_positive true",
]


def settings_for(method: str, *more: str):
    flags = ["--train.batch_size", str(BATCH), "--train.samples", "800"]
    return read_settings(None, [*flags, "--objective", *method.split(), *more])


def noted(method: str, pairs: int, *more: str, ranks: int = 1) -> Findings:
    findings, settings = Findings(), settings_for(method, *more)
    findings.note("plan", pairs_per_epoch=pairs)
    note_plan(findings, settings, pairs, ranks=ranks)
    note_objective(findings, settings, MODEL, pairs, ranks=ranks)
    return findings


@pytest.mark.parametrize("method", METHODS)
def test_the_state_has_the_size_of_the_objective_that_a_run_builds(method):
    settings = settings_for(method)
    known = {"embed_dim": WIDTH, "dataset_size": PAIRS, "epoch_samples": 0, "total_samples": 800}
    state = build_objective(settings.objective_name, settings.objective, **known).state_dict().values()
    size = sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
    assert noted(method, PAIRS)["objective.state_bytes"] == size
    assert noted(method, PAIRS)["objective.state_bytes_per_rank"] == size


@pytest.mark.parametrize("method", METHODS)
def test_averages_and_prototypes_are_spread_over_the_ranks_and_mlps_are_not(method):
    findings = noted(method, PAIRS, ranks=2)
    share = 1 if method == "amorlip" or "mlp" in method else 2
    assert findings["objective.state_bytes"] == share * findings["objective.state_bytes_per_rank"]


def remedies(method: str, pairs: int, *more: str) -> list[str]:
    return [advice.remedy for advice in noted(method, pairs, *more).warnings]


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
    findings, settings = noted(method, 400), settings_for(method)
    assert (findings["fastclip.steps_between_visits"], findings["fastclip.visits_per_pair"]) == (25, 2)
    prototypes = getattr(settings.objective, "num_prototypes", 4096)
    assert (findings["neuclip.prototypes"], findings["neuclip.steps_to_fill"]) == (prototypes, -(-prototypes // BATCH))


def test_rho_is_measured_by_the_batch_in_the_minibatch_form_and_by_the_data_elsewhere():
    form = "clip --objective.form minibatch --objective.rho"
    assert remedies(f"{form} 2.8", 800) == ["give --objective.rho 1.9"]  # log 15 = 2.7
    assert remedies(f"{form} 2.6", 800) == []
    of_data = "neuclip --objective.num_prototypes 16 --objective.restart_every 9 --objective.rho 6.7"
    assert remedies(of_data, 800) == ["give --objective.rho 4.7"]  # log 799 = 6.68
    assert remedies(of_data, 900) == ["give --train.samples 912 for one epoch"]  # 57 whole batches
