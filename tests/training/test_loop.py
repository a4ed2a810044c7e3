"""However a run is ended, what it has learned is saved: signals, a lost terminal, data that are bad or gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from neuclip import api
from neuclip.cli.main import main
from neuclip.data.loader import Batches
from neuclip.data.open import open_source
from neuclip.data.order import Order
from neuclip.distributed.ranks import StopRequest, stop_requests
from neuclip.errors import RunFailed
from neuclip.evaluation import embedding
from neuclip.records import RunFolder, read_lines
from neuclip.runs import build, results
from neuclip.settings.sections import Settings
from neuclip.settings.writing import settings_as_yaml
from neuclip.training import loop
from neuclip.training.loop import BatchReader, Interval, caption_ids
from tests.builders.data import Member, image_bytes, pair, plain, tokenize, write_shards, write_tar
from tests.builders.images import write_shards as write_drawings
from tests.builders.models import SMALL_FILE
from tests.builders.processes import run
from tests.builders.runs import BATCH, STEPS, last_checkpoint, losses, settings_for


@pytest.fixture
def folder(tmp_path) -> Path:
    write_drawings(tmp_path / "shards", 40)
    return tmp_path


def settings_of(folder: Path, *flags: str) -> Settings:
    evaluated = ["--run.name", "run", "--evaluation.every", str(4 * BATCH)]
    return settings_for(folder, folder / "shards", *evaluated, *flags, model=SMALL_FILE)


def saved_step(run: Path) -> int:
    return last_checkpoint(run)["step"]


def test_a_stderr_that_nobody_reads_ends_nothing(folder, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        api.train(settings_of(folder))
    assert len(losses(folder / "run")) == STEPS and RunFolder(folder / "run").summary.exists()


def after_four_steps(monkeypatch, action) -> None:
    take_step = loop.take_step

    def patched(run, *rest):
        if run.step == 4:
            action(run)
        return take_step(run, *rest)

    monkeypatch.setattr(loop, "take_step", patched)


def test_data_that_vanish_end_the_run_at_a_saved_step(folder, monkeypatch):
    def lose_data(_):
        for shard in (folder / "shards").glob("*.tar"):
            shard.write_bytes(shard.read_bytes()[:100])

    after_four_steps(monkeypatch, lose_data)
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


def test_what_is_not_a_number_is_not_saved_and_not_learned(folder, monkeypatch):
    def poison(run):
        with torch.no_grad():
            next(p for p in run.built.towers.parameters() if p.ndim == 4).fill_(torch.nan)

    after_four_steps(monkeypatch, poison)
    with pytest.raises(RunFailed, match=r"not a number at step 4 .*sample ids \d+, .*; start a new run with"):
        api.train(settings_of(folder, "--evaluation.every", "0"))
    state = last_checkpoint(folder / "run")
    assert state["step"] == 3 and all(torch.isfinite(x).all() for x in state["model"].values() if x.is_floating_point())


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
        build.build_towers = signal_group
    return main(arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "message"), [("evaluation", "stopped and saved at 32 of 96"), ("start", "stopped before the first step")]
)
def test_sigterm_to_a_run_and_its_workers_ends_it_in_one_line_and_no_step_is_lost(folder, moment, message):
    held_out = ["--evaluation.retrieval", str(folder / "shards"), "--evaluation.batch_size", "4"]
    settings = settings_of(folder, *held_out, "--data.workers", "2")
    (folder / "settings.yaml").write_text(settings_as_yaml(settings))
    child = run(main_signalled, moment, ["train", str(folder / "settings.yaml")])
    assert child.code == 143, child.errors
    assert "Traceback" not in child.errors and "Signal 17" not in child.errors
    assert message in child.errors.splitlines()[-1]
    if moment == "evaluation":
        assert saved_step(folder / "run") == 4 and not read_lines(RunFolder(folder / "run").evaluation)


# --- Batches: what was bad is on the list, however the run ends ---------------------------------------------------


class InOrder(Order):
    """Ids as they lie."""

    def ids(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count) % self.size


def run_of(source, folder, *, workers: int = 0, transform=plain):
    """What a reader asks of a run, in batches of four and in order of ids."""
    order = InOrder(len(source), seed=0)
    fixed = {"batch_size": 4, "tokenize": tokenize, "seed": 0}
    batches = Batches(source, order, transform=transform, workers=workers, **fixed)
    folder.mkdir()
    return SimpleNamespace(
        folder=RunFolder(folder),
        source=source,
        remaining_batches=partial(batches.steps, 0, len(source) // 4),
        settings=SimpleNamespace(data=SimpleNamespace(max_bad_share=1.0)),
        step=0,
    )


def read(run, stop: StopRequest | None = None, save=lambda run: None) -> int:
    """How many batches there are."""
    reader = BatchReader(run, stop or StopRequest(), save)
    return sum(reader.read() is not None for _ in range(len(run.source) // 4))


def without_caption(number: int) -> list[Member]:
    return [(f"{number}.png", image_bytes(number)), (f"{number}.json", b'{"text": "a cat"}')]


def test_a_run_with_nothing_bad_has_an_empty_list(tmp_path):
    run = run_of(open_source(str(write_shards(tmp_path / "shards", [8]))), tmp_path / "run")
    assert read(run) == 2
    assert run.folder.skipped.read_bytes() == b""


def test_what_never_became_a_sample_is_told_before_the_first_step_and_listed(tmp_path, capsys):
    members = [member for number in range(8) for member in pair(number)]
    source = open_source(str(write_tar(tmp_path / "0.tar", [*members, ("x.txt", b"alone"), ("y.txt", b"alone")])))
    run = run_of(source, tmp_path / "run")
    assert read(run) == 2 and "at least 2 could not be indexed: 2 x no image; first: " in capsys.readouterr().err
    assert [line["reason"] for line in read_lines(run.folder.skipped)] == ["no image"] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_where_nothing_can_stand_in_for_bad_samples_saves_and_says_which_and_why(tmp_path, workers):
    members = [member for number in range(8) for member in without_caption(number)]
    run = run_of(open_source(str(write_tar(tmp_path / "0.tar", members))), tmp_path / "run", workers=workers)
    saved: list[bool] = []
    with pytest.raises(RunFailed, match=r"sample 0 is bad \(caption is missing, .*no replacement found") as failure:
        read(run, save=lambda _: saved.append(True))
    assert "--data.caption_key text" in str(failure.value) and "\n" not in str(failure.value) and saved == [True]


def test_bad_samples_are_listed_and_a_shard_that_disappears_ends_the_run_in_one_line(tmp_path):
    write_tar(tmp_path / "shards" / "0.tar", [*without_caption(0), *pair(1), *pair(4), *pair(5)])
    write_tar(tmp_path / "shards" / "1.tar", [*pair(2), *pair(3), *pair(6), *pair(7)])
    run = run_of(open_source(str(tmp_path / "shards")), tmp_path / "run")
    (tmp_path / "shards" / "1.tar").unlink()
    with pytest.raises(RunFailed, match=r"1\.tar: cannot be read .*--resume"):
        read(run)
    assert [line["id"] for line in read_lines(run.folder.skipped)] == [0]


def hang(image: object) -> torch.Tensor:
    """In a data worker: the run is asked to stop while it waits for a batch that never comes."""
    os.kill(os.getppid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError


def test_a_request_to_stop_does_not_wait_for_a_data_worker_that_hangs(tmp_path):
    run = run_of(open_source(str(write_shards(tmp_path / "shards", [8]))), tmp_path / "run", workers=1, transform=hang)
    with stop_requests() as stop:
        assert BatchReader(run, stop, lambda run: None).read() is None
    for worker in multiprocessing.active_children():
        worker.join()  # it was killed: nothing else ends a stopped process
    assert stop.signal == signal.SIGTERM


# --- When something is due, and equal captions --------------------------------------------------------------------


def passed(interval: Interval) -> list[int]:
    plan = SimpleNamespace(batch_size=8)
    return [samples for samples in range(8, 97, 8) if interval.passed(SimpleNamespace(samples=samples, plan=plan))]


def test_an_interval_is_passed_once_for_each_multiple_of_its_samples_and_never_if_it_is_zero():
    assert passed(Interval(20)) == [24, 40, 64, 80]
    assert passed(Interval(0)) == []


def test_an_interval_by_time_starts_again_when_it_is_passed(monkeypatch):
    seconds = iter([0, 30, 60, 60, 100, 121, 121, *range(122, 130)])  # at the start, each question, each new start
    monkeypatch.setattr("neuclip.training.loop.time.monotonic", lambda: next(seconds))
    assert passed(Interval(0, minutes=1)) == [16, 32]


def test_captions_share_a_number_exactly_when_their_tokens_are_equal():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, (400, 6), generator=generator)  # 729 possible rows, so many are equal
    numbers = caption_ids(tokens)
    equal = (tokens[:, None] == tokens[None]).all(dim=2)
    assert torch.equal(numbers[:, None] == numbers[None], equal)
    assert equal.sum() > 400 and numbers.dtype == torch.int64 and torch.equal(caption_ids(tokens.int()), numbers)
