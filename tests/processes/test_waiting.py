"""Ranks wait for one that works, and name one that does not start or does not answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def start(what: str, *ranks: int) -> list[subprocess.Popen[str]]:
    """Of two ranks those that are named, without torchrun, which would end the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes.waiting", what],
            env=common | {"RANK": str(rank)},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in ranks
    ]


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize(("present", "missing"), [(0, "rank 1 of 2"), (1, "rank 0 at 127.0.0.1")])
def test_a_rank_that_does_not_start_is_named(present, missing):
    (process,) = start("start", present)
    out, errors = process.communicate()
    assert out.startswith(missing) and "did not start within" in out
    assert f"waiting for {missing}" in errors


@pytest.mark.parametrize(("what", "stopped"), [("step", 1), ("main", 0)])
def test_a_stopped_rank_is_named_and_ends_the_other(what, stopped):
    processes = start(what, 0, 1)
    out, errors = processes[1 - stopped].communicate()
    kill(processes[stopped])
    assert out.startswith(f"rank {stopped} ") and "does not answer" in out
    assert what == "step" or "waiting for rank 0, which does not answer" in errors


def test_work_of_the_main_rank_may_take_longer_than_the_limit_of_a_step():
    for process in start("long", 0, 1):
        assert process.communicate()[0] == "done\n"
