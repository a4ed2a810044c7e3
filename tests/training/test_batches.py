"""Batches as a run reads them: what was bad is on the list, however the run ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from neuclip.data.loader import Batches
from neuclip.data.open import open_source
from neuclip.data.order import Order
from neuclip.distributed.stopping import StopRequest, stop_requests
from neuclip.errors import RunFailed
from neuclip.records import RunFolder, read_lines
from neuclip.training.batches import BatchReader
from tests.builders.data import Member, image_bytes, pair, plain, tokenize, write_shards, write_tar


class InOrder(Order):
    """Ids as they lie."""

    def ids(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count) % self.size


def run_of(source, folder, *, workers: int = 0, transform=plain):
    """What a reader asks of a run, in batches of four and in order of ids."""
    batches = Batches(
        source,
        InOrder(len(source), seed=0),
        batch_size=4,
        transform=transform,
        tokenize=tokenize,
        seed=0,
        workers=workers,
    )
    folder.mkdir()
    return SimpleNamespace(
        folder=RunFolder(folder),
        source=source,
        device=torch.device("cpu"),
        remaining_batches=partial(batches.steps, 0, len(source) // 4),
        settings=SimpleNamespace(data=SimpleNamespace(max_bad_share=1.0)),
    )


def read(run) -> int:
    return sum(1 for _ in BatchReader(run, StopRequest(), save=lambda: None))


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
    source = open_source(str(write_tar(tmp_path / "0.tar", members)))
    run = run_of(source, tmp_path / "run", workers=workers)
    saved: list[bool] = []
    with pytest.raises(RunFailed, match=r"sample 0 is bad \(caption is missing, .*no replacement found") as failure:
        list(BatchReader(run, StopRequest(), save=lambda: saved.append(True)))
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
        assert not list(BatchReader(run, stop, save=lambda: None))
    for worker in multiprocessing.active_children():
        worker.join()  # it was killed: nothing else ends a stopped process
    assert stop.signal == signal.SIGTERM
