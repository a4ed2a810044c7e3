"""Ranks wait for one that works, and name one that does not start, has ended, or does not answer."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from neuclip.distributed import collectives, ranks
from neuclip.distributed.collectives import any_rank, rank
from neuclip.distributed.ranks import on_main_rank, process_group
from neuclip.errors import RunFailed
from tests.builders.processes import Child, of_rank, rank_variables, start

pytestmark = pytest.mark.slow

STEP, PATIENCE = 3.0, 6.0  # seconds


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def cut_connections() -> None:
    """As when a cable is pulled: every connection of this process ends, and it lives on."""
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if file.readlink().name.startswith("socket:"):
                socket.socket(fileno=os.dup(int(file.name))).shutdown(socket.SHUT_RDWR)


def work_longer_than_a_step() -> None:
    threading.Event().wait(1.3 * STEP)


EVENTS = {"stopped": stop_this_process, "killed": kill_this_process, "cut off": cut_connections}


def one_rank(what: str, where: str, whom: int) -> None:
    """With short limits; what became of it is printed."""
    collectives.STEP_TIMEOUT, collectives.PATIENCE = timedelta(seconds=STEP), timedelta(seconds=PATIENCE)
    ranks.ANSWER_SECONDS, ranks.START_SECONDS = 1.0, 1.2 if what == "starts alone" else 300.0
    try:
        with process_group(torch.device("cpu")):
            if where == "a step":
                if rank() == whom:
                    EVENTS[what]()
                any_rank(False)
            else:
                on_main_rank(work_longer_than_a_step if what == "works" else EVENTS[what])
        print("done")
    except RunFailed as failure:
        print(failure)


def start_ranks(*present: int, what: str = "works", where: str = "", whom: int = 0) -> dict[int, Child]:
    """Of two ranks those that are present."""
    world = rank_variables(2)
    return {number: start(one_rank, what, where, whom, **world, **of_rank(number)) for number in present}


@pytest.mark.parametrize(("present", "missing"), [(0, "rank 1 of 2"), (1, "rank 0 at 127.0.0.1")])
def test_a_rank_that_does_not_start_is_named(present, missing):
    ended = start_ranks(present, what="starts alone")[present].wait()
    assert ended.output.startswith(missing) and "did not start within 0.02 minutes" in ended.output
    assert ended.output.count("\n") == 1 and not ended.errors


@pytest.mark.parametrize(
    ("what", "where", "whom"),
    [
        ("stopped", "a step", 1),
        ("killed", "a step", 0),  # which hosts the store
        ("cut off", "a step", 1),
        ("stopped", "work of the main rank", 0),
        ("killed", "work of the main rank", 0),
    ],
)
def test_a_lost_rank_is_named_in_one_line_and_ends_the_other(what, where, whom):
    children = start_ranks(0, 1, what=what, where=where, whom=whom)
    ended = children[1 - whom].wait()
    if what == "stopped":
        children[whom].signal(signal.SIGKILL)
    children[whom].wait()
    message = f"rank {whom} of 2 has ended or does not answer; see its own message or torchrun's"
    assert ended.output.startswith(message) and ended.output.count("\n") == 1, ended
    assert "continue with --resume" in ended.output and "Traceback" not in ended.errors


def test_work_of_the_main_rank_may_take_longer_than_the_limit_of_a_step():
    assert [child.wait().output for child in start_ranks(0, 1).values()] == ["done\n"] * 2
