"""A new objective is one class, one dataclass and a line in two tables: everything else asks these."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip import FastCLIP, api, objectives
from neuclip.objectives.objective import objective
from neuclip.records import RunFolder, read_lines
from neuclip.report.charts import CURVES
from neuclip.report.contents import read_contents
from neuclip.report.findings import findings
from neuclip.runs.doctor import examine
from neuclip.settings import objectives as settings_table
from neuclip.settings.objectives import FastCLIPSettings
from neuclip.settings.options import option
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import help_text
from tests.builders.images import write_csv, write_shards

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
    contents = read_contents(folder)
    poor = replace(contents, summary=contents.summary | {"calibration": 3.0})
    assert "too small. Try a larger objective.power." in next(s for s in findings(poor) if "Calibration" in s)
    assert {curve.key for curve in CURVES} <= {key for record in contents.records for key in record}
    assert "PowerCLIP" in folder.report.read_text()
    assert "power: 1.5" in folder.settings.read_text()


def test_doctor_and_help_know_the_new_objective(settings):
    found = examine(settings)
    assert found.ready and any("visited 1.2 times" in what for what, _, _ in found.warnings)
    text = help_text(["objective"])
    assert "a large power forgets no hard batch" in text and "--objective.power X" in text


def test_its_renewal_is_the_mean_it_is_said_to_be():
    old, target = torch.randn(2, 2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    found = PowerCLIP(dataset_size=9, power=1.5, gamma=0.3, gamma_schedule="constant").renew(old, target)
    assert torch.allclose(found.exp() ** 1.5, 0.7 * old.exp() ** 1.5 + 0.3 * target.exp() ** 1.5, rtol=1e-12)
    with pytest.raises(ValueError, match="power is 99; give a number above 0 and at most 50"):
        PowerCLIP(dataset_size=9, power=99)


def test_another_gives_more_features_to_the_same_method():
    """DRRho takes a frozen reference's similarities off: s_ij - r_ij = [x, r_x] . [y, -r_y]."""
    image, text, of_image, of_text = (F.normalize(torch.randn(7, 5, dtype=torch.float64), dim=1) for _ in range(4))
    image.requires_grad_()
    wide = torch.cat([image, of_image], 1) / math.sqrt(2), torch.cat([text, -of_text], 1) / math.sqrt(2)
    got = FastCLIP(7, rho=2.0)(*wide, torch.tensor(2 * 12.0), sample_ids=torch.arange(7))
    s = image @ text.T - of_image @ of_text.T
    own = torch.eye(7, dtype=torch.bool)
    excess = [torch.exp((x - s.diagonal()[:, None]) * 12).masked_fill(own, 0).sum(1) / 6 for x in (s, s.T)]
    want = (sum(torch.log(1e-6 + g).mean() for g in excess) + 2 * 2.0) / 24
    assert torch.allclose(got, want, rtol=1e-12)
    assert torch.allclose(*torch.autograd.grad(got, image), *torch.autograd.grad(want, image), rtol=1e-10, atol=1e-13)
