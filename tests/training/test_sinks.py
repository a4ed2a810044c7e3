from __future__ import annotations

import pytest

from neuclip.records import RunFolder
from neuclip.settings.sections import LogSettings
from neuclip.training.sinks import open_sinks

RECORD = {"samples": 128, "loss": 0.5, "calibration": None}


def test_tensorboard_gets_the_numbers_by_samples_seen(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (sink,) = open_sinks(LogSettings(tensorboard=True), RunFolder(tmp_path))
    sink.write(RECORD)
    sink.close()
    events = loader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/samples", "train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(128, 0.5)]


def test_wandb_writes_offline_files_into_the_run(tmp_path):
    pytest.importorskip("wandb", reason="the extra neuclip[wandb] is not installed")
    (sink,) = open_sinks(LogSettings(wandb=True), RunFolder(tmp_path))
    sink.write(RECORD)
    sink.close()
    assert list(tmp_path.rglob("*.wandb"))


def test_nothing_is_opened_that_was_not_asked_for(tmp_path):
    assert open_sinks(LogSettings(), RunFolder(tmp_path)) == []
