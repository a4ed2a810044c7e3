"""A new objective is one class, one dataclass and a line in two tables: everything else asks these."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from neuclip import FastCLIP, api, objectives
from neuclip.cli.main import main
from neuclip.objectives.objective import objective
from neuclip.records import RunFolder, read_lines
from neuclip.report.run_report import write_report
from neuclip.runs.doctor import examine
from neuclip.settings import objectives as settings_table
from neuclip.settings.objectives import FastCLIPSettings
from neuclip.settings.options import option
from neuclip.settings.reading import read_settings
from tests.builders.images import write_csv, write_shards
from tests.builders.pages import read_page
from tests.builders.run_folders import change_json

BATCH, STEPS, PAIRS = 8, 6, 40


@dataclass(frozen=True, kw_only=True)
class PowerCLIPSettings(FastCLIPSettings):
    """FastCLIP with a power mean in place of the moving average: a large power forgets no hard batch."""

    title = "PowerCLIP"
    calibration_advice = "Try a larger objective.power."

    power: float = option(2.0, "exponent of the mean over the visits; 1: FastCLIP", above=0, at_most=50)


@objective
class PowerCLIP(FastCLIP, PowerCLIPSettings):
    """u^p <- (1 - gamma) u^p + gamma (eps + g)^p."""

    def renew(self, log_u: Tensor, target: Tensor) -> Tensor:
        return super().renew(self.power * log_u, self.power * target) / self.power


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setitem(settings_table.OBJECTIVES, "power", PowerCLIPSettings)
    monkeypatch.setitem(objectives.OBJECTIVES, "power", PowerCLIP)
    flags = f"""--run.folder {tmp_path} --run.name run --run.threads 1 --data.workers 0 --model.image_size 32
        --train.batch_size {BATCH} --train.samples {STEPS * BATCH} --evaluation.error_anchors 10 --log.every 1
        --data.train {write_shards(tmp_path / "shards", PAIRS)}
        --evaluation.retrieval {write_csv(tmp_path / "held", 12)} --objective power --objective.power 1.5""".split()
    return read_settings(None, flags)


def test_an_objective_defined_elsewhere_is_trained_evaluated_measured_and_reported(settings):
    folder = RunFolder(api.train(settings))
    records = read_lines(folder.records)
    assert len(records) == STEPS and all(math.isfinite(record["loss"]) for record in records)
    assert "calibration_image" in records[-1]
    assert any("recall" in key for key in api.evaluate(str(folder.path)))
    assert api.normalizer_errors([folder.path], anchors=10, seed=0)["runs"][0]["mean"]["method"] > 0
    assert "power: 1.5" in folder.settings.read_text()
    change_json(folder.summary, calibration=3.0)
    page = read_page(write_report(folder))
    assert "PowerCLIP · tiny" in page.text and any("Try a larger objective.power." in one for one in page.findings)
    drawn = {"Loss", "Calibration", "In-batch accuracy", "Normalizers at eps", "Capped exponents", "Normalizer error"}
    assert drawn <= set(page.charts)


def test_doctor_and_help_know_the_new_objective(settings, capsys):
    found = examine(settings)
    assert found.ready and any("seen 1.2 times" in what for what, _, _ in found.warnings)
    capsys.readouterr()
    assert main(["train", "--help", "objective"]) == 0
    text = capsys.readouterr().out
    assert "a large power forgets no hard batch" in text and "--objective.power X" in text


def test_its_renewal_is_the_mean_it_is_said_to_be():
    old, target = torch.randn(2, 2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    found = PowerCLIP(dataset_size=9, power=1.5, gamma=0.3, gamma_schedule="constant").renew(old, target)
    assert torch.allclose(found.exp() ** 1.5, 0.7 * old.exp() ** 1.5 + 0.3 * target.exp() ** 1.5, rtol=1e-12)
    with pytest.raises(ValueError, match="power is 99; give a number above 0 and at most 50"):
        PowerCLIP(dataset_size=9, power=99)
