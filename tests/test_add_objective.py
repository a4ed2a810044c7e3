"""A new objective is one class, one dataclass and a line in two tables: everything else asks these."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from neuclip import api
from neuclip.doctor.diagnosis import examine
from neuclip.objectives import registry
from neuclip.objectives.contrast import mean_normalizer_ratio
from neuclip.objectives.formulas import gradient_only
from neuclip.objectives.objective import Objective
from neuclip.objectives.pairs import Both, Pairs, batch_log_normalizers
from neuclip.records import RunFolder, read_lines
from neuclip.settings import objectives as settings_table
from neuclip.settings.fields import check_at_least, described
from neuclip.settings.help import help_text
from neuclip.settings.objectives import ObjectiveSettings, PlannedRun
from neuclip.settings.reading import read_settings
from tests.builders.images import write_csv, write_shards

BATCH, STEPS = 8, 6


@dataclass(frozen=True, kw_only=True)
class ConstantSettings(ObjectiveSettings):
    """Every normalizer is the mean over all batches so far."""

    title = "ConstantCLIP"

    decay: float = described(0.5, "weight of the past in the mean")
    eps: float = described(1e-4, "added to each normalizer")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("objective.decay", self.decay, 0, "the default is 0.5")

    def loss_at_chance(self, batch_size: int, temperature: float) -> float:
        return 2 * math.log1p(self.eps)

    def state_bytes(self, embed_dim: int, dataset_size: int) -> int:
        return 8

    def advice(self, run: PlannedRun) -> list[tuple[str, str, str]]:
        return [("this method is a toy", "it forgets who is who", "give --objective neuclip")]


class ConstantCLIP(Objective):
    needs = ("embed_dim",)
    metric_names = (*Objective.metric_names, "calibration_image", "calibration_text")

    mean: Tensor  # (2,)

    def __init__(self, embed_dim: int, *, decay: float = 0.5, eps: float = 1e-4, mask_duplicates: bool = False) -> None:
        super().__init__(embed_dim, mask_duplicates=mask_duplicates)
        self.settings = ConstantSettings.from_arguments(locals())
        self.register_buffer("mean", torch.zeros(2))

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        self.record_accuracy(pairs)
        image, text = batch_log_normalizers(pairs, tau, self.settings.eps)
        self.record_calibration((torch.exp(image - self.mean[0]).mean(), torch.exp(text - self.mean[1]).mean()))
        if self.training:
            self.mean.lerp_(torch.stack([image.mean(), text.mean()]), 1 - self.settings.decay)
        return image.mean() + text.mean() + gradient_only(mean_normalizer_ratio(pairs, tau, self.estimates(pairs, tau)))

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float | None = None) -> Both:
        return self.mean[0].expand(len(pairs.image)), self.mean[1].expand(len(pairs.image))


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setitem(settings_table.OBJECTIVES, "constant", ConstantSettings)
    monkeypatch.setitem(registry.OBJECTIVES, "constant", ConstantCLIP)
    flags = f"""--run.folder {tmp_path} --run.name run --run.threads 1 --data.workers 0 --model.image_size 32
        --train.batch_size {BATCH} --train.samples {STEPS * BATCH} --evaluation.error_anchors 10 --log.every 1
        --data.train {write_shards(tmp_path / "shards", 40)} --evaluation.retrieval {write_csv(tmp_path / "held", 12)}
        --objective constant --objective.decay 0.25""".split()
    return read_settings(None, flags)


def test_an_objective_defined_elsewhere_is_trained_evaluated_doctored_measured_and_reported(settings):
    folder = RunFolder(api.train(settings))
    records = read_lines(folder.records)
    assert len(records) == STEPS and all(math.isfinite(record["loss"]) for record in records)
    assert "calibration_image" in records[-1]
    assert any("recall" in key for key in api.evaluate(str(folder.path)))
    error = api.normalizer_errors([folder.path], anchors=10, seed=0)
    assert error["runs"][0]["mean"]["method"] > 0 and error["eps"] == 1e-4
    assert "ConstantCLIP" in folder.report.read_text()
    assert "decay: 0.25" in folder.settings.read_text()


def test_doctor_and_help_know_the_new_objective(settings):
    findings, _ = examine(settings, sample=5)
    assert findings.ready and findings["objective.first_loss"] == pytest.approx(2 * math.log1p(1e-4))
    assert findings["objective.state_bytes_per_rank"] == 8
    assert "this method is a toy" in [advice.what for advice in findings.warnings]
    text = help_text(["objective"])
    assert "Every normalizer is the mean over all batches so far." in text and "--objective.decay X" in text
