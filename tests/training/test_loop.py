"""However a run is ended, what it has learned is saved: signals, a closed stderr, data that are gone."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from neuclip import api
from neuclip.cli.main import main
from neuclip.errors import RunFailed, RunInterrupted
from neuclip.evaluation import embedding
from neuclip.records import RunFolder, read_lines
from neuclip.runs import lifecycle, results
from neuclip.settings.sections import Settings
from neuclip.settings.writing import settings_as_yaml
from neuclip.training.accumulation import Accumulation
from tests.builders.images import write_shards
from tests.builders.models import SMALL_FILE
from tests.builders.processes import run
from tests.builders.runs import BATCH, last_checkpoint, settings_for

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path) -> Path:
    write_shards(tmp_path / "shards", 40)
    return tmp_path


def settings_of(folder: Path, *flags: str) -> Settings:
    evaluated = ["--run.name", "run", "--evaluation.every", str(4 * BATCH)]
    return settings_for(folder, folder / "shards", *evaluated, *flags, model=SMALL_FILE)


def saved_step(run: Path) -> int:
    return last_checkpoint(run)["step"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_other_signals_that_end_a_job_save_it_like_sigterm(folder, monkeypatch, number):
    before = signal.signal(number, signal.SIG_DFL)  # below nohup SIGHUP is ignored, and would stay so
    monkeypatch.setattr(results, "evaluate_on_the_way", lambda *_: signal.raise_signal(number))
    with pytest.raises(RunInterrupted, match="stopped and saved at 32 of 96") as stopped:
        api.train(settings_of(folder))
    assert signal.signal(number, before) == signal.SIG_DFL
    assert stopped.value.exit_code == 128 + number and saved_step(folder / "run") == 4


def test_a_stderr_that_nobody_reads_stops_and_saves_the_run(folder, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with pytest.raises(RunInterrupted, match="saved at 8 of 96") as stopped:
            api.train(settings_of(folder))
        assert sys.stderr is stderr
    assert stopped.value.exit_code == 128 + signal.SIGPIPE and saved_step(folder / "run") == 1


def test_data_that_vanish_end_the_run_at_a_saved_step(folder, monkeypatch):
    features, steps = Accumulation.features, iter(range(12))

    def features_then_loss_of_data(self, images, tokens):
        if next(steps) == 4:
            for shard in (folder / "shards").glob("*.tar"):
                shard.write_bytes(shard.read_bytes()[:100])
        return features(self, images, tokens)

    monkeypatch.setattr(Accumulation, "features", features_then_loss_of_data)
    with pytest.raises(RunFailed):
        api.train(settings_of(folder, "--evaluation.every", "0"))
    assert saved_step(folder / "run") == 5


def test_an_evaluation_that_fails_costs_no_step(folder, monkeypatch):
    def fail(*_):
        raise RunFailed("held-out data are gone")

    monkeypatch.setattr(results, "evaluate_on_the_way", fail)
    with pytest.raises(RunFailed, match="are gone"):
        api.train(settings_of(folder))
    assert saved_step(folder / "run") == 4


def test_a_checkpoint_saved_after_divergence_is_refused_in_one_line(folder):
    diverging = settings_of(folder, "--optimizer.learning_rate", "1e30", "--optimizer.warmup", "0",
                             "--checkpoint.every_samples", "8")  # fmt: skip
    with pytest.raises(RunFailed, match="not a number at step 1"):
        api.train(diverging)
    with pytest.raises(RunFailed, match=r"not a number at step 1 .*continue from the one before"):
        api.train(diverging, resume=folder / "run")


def main_signalled(moment: str, arguments: list[str]) -> int:
    """SIGTERM to the whole process group, data workers too."""

    def signal_group(*_):
        os.killpg(0, signal.SIGTERM)

    def track(items, *_, **__):
        for number, item in enumerate(items):
            assert number == 0, "the evaluation went on"
            signal_group()
            yield item

    if moment == "evaluation":
        embedding.track = track
    else:
        lifecycle.build_towers = signal_group
    return main(arguments)


def send_sigterm(folder: Path, moment: str) -> list[str]:
    """What was printed."""
    held_out = ["--evaluation.retrieval", str(folder / "shards"), "--evaluation.batch_size", "4"]
    settings = settings_of(folder, *held_out, "--data.workers", "2")
    (folder / "settings.yaml").write_text(settings_as_yaml(settings))
    child = run(main_signalled, moment, ["train", str(folder / "settings.yaml")])
    assert child.code == 143, child.errors
    assert "Traceback" not in child.errors and "Signal 17" not in child.errors
    return child.errors.splitlines()


def test_sigterm_interrupts_an_evaluation_and_no_step_is_lost(folder):
    assert "stopped and saved at 32 of 96" in send_sigterm(folder, "evaluation")[-1]
    assert saved_step(folder / "run") == 4
    assert not read_lines(RunFolder(folder / "run").evaluation)


def test_sigterm_while_the_run_is_built_ends_it_in_one_line(folder):
    assert "stopped before the first step" in send_sigterm(folder, "start")[-1]


def test_broken_numbers_are_not_saved(folder, monkeypatch):
    features, steps = Accumulation.features, iter(range(12))

    def broken(self, images, tokens):
        image, *rest = features(self, images, tokens)
        return image * torch.nan if next(steps) == 4 else image, *rest

    monkeypatch.setattr(Accumulation, "features", broken)
    with pytest.raises(RunFailed, match="not a number at step 4"):
        api.train(settings_of(folder, "--evaluation.every", "0"))
    assert saved_step(folder / "run") == 3
