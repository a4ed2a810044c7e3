"""Memory: the estimate's parts, and when it is too much."""

from __future__ import annotations

import pytest

from neuclip.doctor import resources
from neuclip.doctor.findings import Findings
from neuclip.doctor.objective import note_objective
from neuclip.doctor.plan import note_plan
from neuclip.doctor.resources import LIBRARIES, Memory, fitting_chunk, note_device, note_memory
from neuclip.models.facts import ModelFacts
from neuclip.plan import Plan
from neuclip.settings.reading import read_settings

PARAMETERS, ACTIVATIONS, BATCH = 10_000_000, 20_000_000, 100
MODEL = ModelFacts(128, (48, 48), 16, PARAMETERS, 4 * PARAMETERS, ACTIVATIONS)


def noted(free: float, everything: float, monkeypatch, *flags: str, ranks: int = 1) -> Findings:
    monkeypatch.setattr(resources, "available_memory", lambda device: Memory(int(free), int(everything)))
    settings = read_settings(
        None, ["--train.batch_size", str(BATCH), "--train.samples", "9000", "--run.device", "cpu", *flags]
    )
    findings = Findings()
    findings.note("plan", pairs_per_epoch=1000)
    note_plan(findings, settings, 1000, ranks)
    note_objective(findings, settings, MODEL, 1000, ranks)
    findings.warnings.clear()
    note_device(findings, settings)
    note_memory(findings, settings, MODEL)
    return findings


def test_the_estimate_is_the_sum_of_its_parts(monkeypatch):
    findings = noted(1e12, 1e12, monkeypatch)
    assert findings["memory.activation_bytes"] == BATCH * ACTIVATIONS
    assert findings["memory.towers_bytes"] == 16 * PARAMETERS
    assert findings["memory.libraries_bytes"] == LIBRARIES
    parts = ("libraries", "towers", "activation", "objective", "loading")
    assert findings["memory.total_bytes"] == sum(findings[f"memory.{part}_bytes"] for part in parts)
    halved = noted(1e12, 1e12, monkeypatch, "--run.precision", "bf16", "--train.micro_batch_size", "10")
    assert halved["memory.activation_bytes"] == 10 * ACTIVATIONS // 2


@pytest.mark.parametrize(
    ("free", "everything", "warned", "failed"),
    [(1.2, 2, False, False), (1.05, 2, True, False), (0.1, 0.7, True, False), (0.1, 0.6, False, True)],
)
def test_too_much_is_warned_of_and_far_too_much_is_a_failure(free, everything, warned, failed, monkeypatch):
    total = noted(1e12, 1e12, monkeypatch)["memory.total_bytes"]
    findings = noted(free * total, everything * total, monkeypatch)
    assert (bool(findings.warnings), bool(findings.problems)) == (warned, failed)


def test_ranks_on_one_machine_share_its_memory(monkeypatch):
    total = noted(1e12, 1e12, monkeypatch, ranks=4)["memory.total_bytes"]
    findings = noted(2 * total, 9 * total, monkeypatch, ranks=4)
    assert findings["memory.together_bytes"] == 4 * total
    assert "if all 4 ranks are on this machine" in findings.warnings[0].what
    assert noted(5 * total, 9 * total, monkeypatch, ranks=4).warnings == []


def test_the_proposed_micro_batch_fits_and_leaves_batch_norm_two_pairs():
    normed = ModelFacts(128, (48, 48), 16, PARAMETERS, 4, ACTIVATIONS, batch_norm=True)

    def fitting(most: int, local: int, model: ModelFacts = MODEL) -> int:
        return fitting_chunk(most, Plan(1, local, 10, 0, local, local), model)

    assert (fitting(50, 100), fitting(500, 100)) == (32, 64)
    assert fitting(0, 100) == fitting(-3, 100) == fitting(5, 1) == 0
    assert (fitting(2, 3), fitting(2, 3, normed), fitting(1, 8, normed)) == (2, 0, 0)
