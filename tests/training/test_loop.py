"""However a run is ended, what it has learned is saved: signals, a closed stderr, data that are gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from neuclip import api
from neuclip.errors import RunFailed, RunInterrupted
from neuclip.records import RunFolder, read_lines
from neuclip.runs import results
from neuclip.runs.checkpoint import checkpoints_in, load_checkpoint
from neuclip.settings.writing import settings_as_yaml
from neuclip.training.accumulation import Accumulation
from tests.builders.images import write_shards
from tests.processes.test_trainer_ranks import SMALL
from tests.processes.trainer import settings_for

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    write_shards(tmp_path / "shards", 40)
    return tmp_path


def saved_step(run: Path) -> int:
    return load_checkpoint(checkpoints_in(RunFolder(run).checkpoints)[-1])["step"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_other_signals_that_end_a_job_save_it_like_sigterm(folder, monkeypatch, number):
    monkeypatch.setattr(results, "evaluate_on_the_way", lambda *_: signal.raise_signal(number))
    with pytest.raises(RunInterrupted, match="stopped and saved at 32 of 96") as stopped:
        api.train(settings_for(folder, "run"))
    assert stopped.value.exit_code == 128 + number and saved_step(folder / "run") == 4


def test_a_stderr_that_nobody_reads_stops_and_saves_the_run(folder, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with pytest.raises(RunInterrupted, match="saved at 8 of 96") as stopped:
            api.train(settings_for(folder, "run"))
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
        api.train(settings_for(folder, "run", "--evaluation.every", "0"))
    assert saved_step(folder / "run") == 5


def test_an_evaluation_that_fails_costs_no_step(folder, monkeypatch):
    def fail(*_):
        raise RunFailed("held-out data are gone")

    monkeypatch.setattr(results, "evaluate_on_the_way", fail)
    with pytest.raises(RunFailed, match="are gone"):
        api.train(settings_for(folder, "run"))
    assert saved_step(folder / "run") == 4


def test_a_checkpoint_saved_after_divergence_is_refused_in_one_line(folder):
    diverging = settings_for(folder, "run", "--optimizer.learning_rate", "1e30", "--optimizer.warmup", "0",
                             "--checkpoint.every_samples", "8")  # fmt: skip
    with pytest.raises(RunFailed, match="not a number at step 1"):
        api.train(diverging)
    with pytest.raises(RunFailed, match=r"not a number at step 1 .*continue from the one before"):
        api.train(diverging, resume=folder / "run")


SIGNALLED = """
import os, signal, sys
from neuclip.cli.main import main
from neuclip.evaluation import embedding
from neuclip.runs import lifecycle
def signal_group(*_):
    os.killpg(0, signal.SIGTERM)
def track(items, *_, **__):
    for number, item in enumerate(items):
        assert number == 0, "the evaluation went on"
        signal_group()
        yield item
if sys.argv[2] == "evaluation":
    embedding.track = track
else:
    lifecycle.build_towers = signal_group
sys.exit(main(["train", sys.argv[1]]))
"""


def send_sigterm(folder: Path, moment: str) -> list[str]:
    """To the whole process group, data workers too; what was printed."""
    held_out = ["--evaluation.retrieval", str(folder / "shards"), "--evaluation.batch_size", "4"]
    settings = settings_for(folder, "run", *held_out, "--data.workers", "2")
    (folder / "settings.yaml").write_text(settings_as_yaml(settings))
    command = [sys.executable, "-c", SIGNALLED, str(folder / "settings.yaml"), moment]
    child = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert child.returncode == 143, child.stderr
    assert "Traceback" not in child.stderr and "Signal 17" not in child.stderr
    return child.stderr.splitlines()


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
        api.train(settings_for(folder, "run", "--evaluation.every", "0"))
    assert saved_step(folder / "run") == 3
