"""A new objective is one class, one dataclass and a line in two tables: everything else asks these."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
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
class SCENTSettings(FastCLIPSettings):
    """FastCLIP with a gamma per sample: a proximal step of mirror descent on each log-normalizer."""

    title = "SCENT"
    calibration_advice = "Try a larger objective.log_alpha."

    log_alpha: float = option(10.0, "log of the step size; larger: closer to the mini-batch form", at_most=50)


@objective
class SCENT(FastCLIP, SCENTSettings):
    """The new log-normalizer is the minimum over nu of exp(target - nu) + nu + D(nu, old) / alpha, D the Bregman
    distance of exp(-nu)."""

    def renew(self, log_u: Tensor, target: Tensor) -> Tensor:
        x = self.log_alpha + log_u
        return torch.logaddexp(F.logsigmoid(-x) + log_u, F.logsigmoid(x) + target)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setitem(settings_table.OBJECTIVES, "scent", SCENTSettings)
    monkeypatch.setitem(objectives.OBJECTIVES, "scent", SCENT)
    flags = f"""--run.folder {tmp_path} --run.name run --run.threads 1 --data.workers 0 --model.image_size 32
        --train.batch_size {BATCH} --train.samples {STEPS * BATCH} --evaluation.error_anchors 10 --log.every 1
        --data.train {write_shards(tmp_path / "shards", PAIRS)}
        --evaluation.retrieval {write_csv(tmp_path / "held", 12)} --objective scent --objective.log_alpha 1.5""".split()
    return read_settings(None, flags)


def test_an_objective_defined_elsewhere_is_trained_evaluated_measured_and_reported(settings):
    folder = RunFolder(api.train(settings))
    records = read_lines(folder.records)
    assert len(records) == STEPS and all(math.isfinite(record["loss"]) for record in records)
    assert "calibration_image" in records[-1]
    assert any("recall" in key for key in api.evaluate(str(folder.path)))
    assert api.normalizer_errors([folder.path], anchors=10, seed=0)["runs"][0]["mean"]["method"] > 0
    assert "log_alpha: 1.5" in folder.settings.read_text()
    change_json(folder.summary, calibration=3.0)
    page = read_page(write_report(folder))
    assert "SCENT · tiny" in page.text and any("Try a larger objective.log_alpha." in one for one in page.findings)
    drawn = {"Loss", "Calibration", "In-batch accuracy", "Normalizers at eps", "Capped exponents", "Normalizer error"}
    assert drawn <= set(page.charts)


def test_doctor_and_help_know_the_new_objective(settings, capsys):
    found = examine(settings)
    assert found.ready and any("visited 1.2 times" in what for what, _, _ in found.warnings)
    capsys.readouterr()
    assert main(["train", "--help", "objective"]) == 0
    text = capsys.readouterr().out
    assert "a proximal step of mirror descent on each log-normalizer" in text and "--objective.log_alpha X" in text


def test_its_renewal_is_the_minimum_it_is_said_to_be():
    old, target = torch.randn(2, 2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    low, high = torch.minimum(old, target), torch.maximum(old, target)
    for _ in range(100):  # bisection of the derivative
        middle = (low + high) / 2
        slope = 1 - torch.exp(target - middle) + math.exp(-1.5) * (torch.exp(-old) - torch.exp(-middle))
        low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
    assert torch.allclose(SCENT(dataset_size=9, log_alpha=1.5).renew(old, target), middle, rtol=1e-12)
    with pytest.raises(ValueError, match="log_alpha is 99; give at most 50"):
        SCENT(dataset_size=9, log_alpha=99)


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
