"""However a run is ended, what it has learned is saved and what was bad is listed: signals, a lost terminal, data that
are bad or gone, NaN or infinity. And when it saves and measures while nothing ends it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.optim.optimizer import register_optimizer_step_post_hook

from neuclip.cli.main import main
from neuclip.errors import RunFailed, RunInterrupted
from neuclip.records import RunFolder, read_lines
from neuclip.runs.folder import checkpoints_in
from neuclip.settings.writing import settings_as_yaml
from neuclip.training.loop import Interval, caption_ids
from tests.builders import processes
from tests.builders.data import image_bytes, pair, write_tar
from tests.builders.images import write_shards
from tests.builders.processes import at_image, at_write
from tests.builders.runs import BATCH, STEPS, last_checkpoint, losses

AT_STEP_4 = f"samples-{4 * BATCH:012d}"
EVALUATED = ["--evaluation.every", str(4 * BATCH)]


def saved_step(folder: Path) -> int:
    return last_checkpoint(folder / "runs" / "r")["step"]


def test_a_closed_stderr_does_not_end_a_run(train, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        run = train(*EVALUATED)
    assert len(losses(run.path)) == STEPS and run.summary.exists()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_data_that_vanish_end_the_run_at_a_saved_step_with_what_was_bad_before(train, tmp_path, workers):
    """The next batch after the fourth step is read already where there are workers."""
    data = write_shards(tmp_path / "data", 40, spoilt=range(0, 40, 10))

    def lose_data() -> None:
        for shard in data.glob("*.tar"):
            shard.write_bytes(b"")

    flags = ["--data.train", str(data), "--data.max_bad_share", "1", "--data.workers", workers]
    flags += ["--checkpoint.every_samples", "0", "--checkpoint.milestones", "3", "--checkpoint.keep", "9"]
    with at_write(AT_STEP_4, lose_data), pytest.raises(RunFailed, match=r"0000\d\.tar: .*--resume") as failure:
        train(*flags)
    assert "\n" not in str(failure.value)
    steps, listed = len(losses(tmp_path / "runs" / "r")), read_lines(RunFolder(tmp_path / "runs" / "r").skipped)
    assert saved_step(tmp_path) == steps >= 4 and listed and {fault["id"] % 10 for fault in listed} == {0}


def test_a_failed_evaluation_loses_no_step(train, shards, tmp_path):
    def fail() -> None:
        raise MemoryError

    with at_image(3, fail, after=AT_STEP_4), pytest.raises(MemoryError):
        train("--evaluation.retrieval", str(shards), *EVALUATED)
    assert saved_step(tmp_path) == 4


@pytest.mark.parametrize(("every", "saved"), [("24", 0), ("8", 1)])
def test_nan_is_neither_learned_nor_saved_and_a_checkpoint_with_it_is_refused(train, tmp_path, every, saved):
    """The first update breaks the weights, and the loss of the second step shows it."""
    rate = ["--optimizer.learning_rate", "1e30", "--optimizer.warmup", "0", "--checkpoint.every_samples", every]
    away = "move the newest file of .* away to continue from the one before, or " if saved else ""
    message = rf"NaN or infinity at step 1 .*sample ids \d+, .*; stopped before the update; {away}start a new run with"
    with pytest.raises(RunFailed, match=message):
        train(*rate)
    state = last_checkpoint(tmp_path / "runs" / "r")
    assert state["step"] == saved and all(x.isfinite().all() for x in state["model"].values())
    with pytest.raises(RunFailed, match=message):
        train(*rate, resume="auto")


# --- Signals


def main_signalled(moment: str, arguments: list[str]) -> int:
    """SIGTERM to the whole process group, data workers too: when the run makes its folder, or in mid-evaluation."""

    def signal_group() -> None:
        os.killpg(0, signal.SIGTERM)

    making = at_write("environment.json", signal_group)
    with making if moment == "start" else at_image(3, signal_group, after=AT_STEP_4):
        return main(arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "message"), [("evaluation", "stopped and saved at 32 of 96"), ("start", "stopped before the first step")]
)
def test_sigterm_to_a_run_and_its_workers_ends_it_in_one_line_and_no_step_is_lost(
    small_settings, shards, tmp_path, moment, message
):
    flags = ["--run.name", "r", "--evaluation.retrieval", str(shards), "--evaluation.batch_size", "4", *EVALUATED]
    settings = small_settings(tmp_path / "runs", *flags, "--data.workers", "2")
    (tmp_path / "settings.yaml").write_text(settings_as_yaml(settings))
    child = processes.run(main_signalled, moment, ["train", str(tmp_path / "settings.yaml")])
    assert child.code == 143, child.errors
    assert "Traceback" not in child.errors and "Signal 17" not in child.errors
    assert message in child.errors.splitlines()[-1]
    if moment == "evaluation":
        assert saved_step(tmp_path) == 4 and not read_lines(RunFolder(tmp_path / "runs" / "r").evaluation)
    else:
        assert list((tmp_path / "runs").iterdir()) == []


def test_a_signal_within_a_step_ends_the_run_after_that_step_which_is_saved(train, tmp_path):
    calls = count(1)
    ask = lambda *_: signal.raise_signal(signal.SIGTERM) if next(calls) == 5 else None  # noqa: E731
    hook = register_optimizer_step_post_hook(ask)
    try:
        with pytest.raises(RunInterrupted, match="stopped and saved at 40 of 96"):
            train("--objective", "clip")
    finally:
        hook.remove()
    assert saved_step(tmp_path) == len(losses(tmp_path / "runs" / "r")) == 5


def test_a_request_to_stop_does_not_wait_for_a_data_worker_that_hangs(train, monkeypatch):
    def hang(*_: object, **__: object) -> None:
        os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(Image, "open", hang)  # in the worker alone: nothing else reads an image
    with pytest.raises(RunInterrupted, match="stopped and saved at 0 of 96"):
        train("--data.workers", "1")
    for worker in multiprocessing.active_children():
        worker.join()  # it was killed: nothing else ends a stopped process


# --- Bad samples


def test_unusable_samples_are_reported_before_the_first_step_listed_and_counted_once(train, tmp_path, capsys):
    """However often the run is resumed. A run with nothing bad has an empty list."""
    members = [member for number in range(40) for member in pair(number)]
    write_tar(tmp_path / "0.tar", [*members, ("x.txt", b"alone"), ("y.txt", b"alone")])
    for _ in range(2):
        run = train("--data.train", str(tmp_path / "0.tar"), "--data.max_bad_share", "1", resume="auto")
        stderr = capsys.readouterr().err
        assert "at least 2 could not be indexed: 2 x no image; first: " in stderr.partition("  8%")[0]
        assert [line["reason"] for line in read_lines(run.skipped)] == ["no image"] * 2
        assert '"skipped": {\n    "no image": 2\n  }' in run.summary.read_text()
    assert train("--run.name", "sound").skipped.read_bytes() == b""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_run_without_replacements_for_bad_samples_saves_and_names_them_and_the_reason(train, tmp_path, workers):
    bad = [((f"{n}.png", image_bytes(n)), (f"{n}.json", b'{"text": "a cat"}')) for n in range(40)]
    write_tar(tmp_path / "0.tar", [member for pair in bad for member in pair])
    flags = ["--data.train", str(tmp_path / "0.tar"), "--data.max_bad_share", "1", "--data.workers", workers]
    with pytest.raises(RunFailed, match=r"sample \d+ is bad \(caption is missing, .*no replacement found") as failure:
        train(*flags)
    assert "--data.caption_key text" in str(failure.value) and "\n" not in str(failure.value)
    assert checkpoints_in(RunFolder(tmp_path / "runs" / "r"))


# --- When something is due, and equal captions


def passed(interval: Interval) -> list[int]:
    plan = SimpleNamespace(batch_size=8)
    return [samples for samples in range(8, 97, 8) if interval.passed(SimpleNamespace(samples=samples, plan=plan))]


def test_an_interval_is_passed_once_for_each_multiple_of_its_samples_and_never_if_it_is_zero():
    assert passed(Interval(20)) == [24, 40, 64, 80]
    assert passed(Interval(0)) == []


def test_an_interval_by_time_starts_again_when_it_is_passed(monkeypatch):
    seconds = iter([0, 30, 60, 60, 100, 121, 121, *range(122, 130)])  # at the start, each question, each new start
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    assert passed(Interval(0, minutes=1)) == [16, 32]


def test_captions_share_an_id_exactly_when_their_tokens_are_equal():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, (400, 6), generator=generator)  # 729 possible rows, so many are equal
    numbers = caption_ids(tokens)
    equal = (tokens[:, None] == tokens[None]).all(dim=2)
    assert torch.equal(numbers[:, None] == numbers[None], equal)
    assert equal.sum() > 400 and numbers.dtype == torch.int64 and torch.equal(caption_ids(tokens.int()), numbers)
