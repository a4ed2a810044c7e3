"""Ranks wait for one that works, and name one that does not start or does not answer."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch

from neuclip.distributed import collectives, connection
from neuclip.distributed.collectives import any_rank, rank
from neuclip.distributed.error_sync import on_main_rank, process_group
from neuclip.errors import RunFailed
from tests.builders.processes import Child, of_rank, rank_variables, start

pytestmark = pytest.mark.slow

LIMIT = 5.0  # seconds that a step may take


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def work_longer_than_the_limit() -> None:
    threading.Event().wait(1.3 * LIMIT)


def wait_for_another(what: str) -> None:
    if what == "step" and rank() == 1:
        stop_this_process()
    if what == "step":
        any_rank(False)
    if what == "main":
        on_main_rank(stop_this_process)
    if what == "long":
        on_main_rank(work_longer_than_the_limit)


def one_rank(what: str) -> None:
    """With short limits; what became of it is printed."""
    collectives.STEP_TIMEOUT = timedelta(seconds=LIMIT)
    connection.START_SECONDS = 1.0 if what == "start" else 300.0
    connection.SILENT_SECONDS, connection.BEAT_SECONDS = 0.5, 0.2
    try:
        with process_group(torch.device("cpu")):
            wait_for_another(what)
        print("done")
    except RunFailed as failure:
        print(failure)


def start_ranks(what: str, *ranks: int) -> list[Child]:
    """Of two ranks those that are named."""
    world = rank_variables(2)
    return [start(one_rank, what, **world, **of_rank(rank)) for rank in ranks]


@pytest.mark.parametrize(("present", "missing"), [(0, "rank 1 of 2"), (1, "rank 0 at 127.0.0.1")])
def test_a_rank_that_does_not_start_is_named(present, missing):
    (child,) = start_ranks("start", present)
    ended = child.wait()
    assert ended.output.startswith(missing) and "did not start within" in ended.output
    assert f"waiting for {missing}" in ended.errors


@pytest.mark.parametrize(("what", "stopped"), [("step", 1), ("main", 0)])
def test_a_stopped_rank_is_named_and_ends_the_other(what, stopped):
    children = start_ranks(what, 0, 1)
    ended = children[1 - stopped].wait()
    children[stopped].signal(signal.SIGKILL)
    children[stopped].wait()
    assert ended.output.startswith(f"rank {stopped} ") and "does not answer" in ended.output
    assert what == "step" or "waiting for rank 0, which does not answer" in ended.errors


def test_work_of_the_main_rank_may_take_longer_than_the_limit_of_a_step():
    for child in start_ranks("long", 0, 1):
        assert child.wait().output == "done\n"
