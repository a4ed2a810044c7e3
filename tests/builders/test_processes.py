"""The builders of processes and ranks do what they promise to other tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from tests.builders.images import write_csv
from tests.builders.processes import main_killed_at_write, main_on_ranks, on_ranks, run, start, threads


def surroundings() -> None:
    print(os.environ["COLOUR"], Path.cwd(), "open_clip" in sys.modules)
    raise ArithmeticError("of its own")


def test_a_child_has_this_environment_and_folder_and_its_exception_is_a_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOUR", "red")
    ended = run(surroundings)
    assert (ended.code, ended.output) == (1, f"red {tmp_path} True\n") and "ArithmeticError: of its own" in ended.errors
    assert run(surroundings, COLOUR="blue").output.startswith("blue")


def echo() -> None:
    for line in sys.stdin:
        print(line.upper(), end="", flush=True)


def test_one_can_talk_with_a_child_and_send_it_a_signal():
    child = start(echo)
    child.stdin.write("hello\n")
    child.stdin.flush()
    assert child.stdout.readline() == "HELLO\n"
    child.signal(signal.SIGTERM)
    assert child.wait().code == -signal.SIGTERM


def test_a_command_is_killed_within_the_write_that_is_named(tmp_path):
    convert = ["data", "convert", str(write_csv(tmp_path, 3))]
    for number, write in enumerate((1, ".tar")):
        assert main_killed_at_write(write, [*convert, str(tmp_path / f"killed-{number}")]).code == -signal.SIGKILL
    assert main_killed_at_write(1000, [*convert, str(tmp_path / "whole")]).code == 0  # so many writes do not come


def meet() -> int:
    dist.init_process_group("gloo")
    print(dist.get_rank(), dist.get_world_size(), sum_of_ranks(dist.get_rank()))
    own = dist.get_rank()
    dist.destroy_process_group()
    return own


def sum_of_ranks(own: int) -> int:
    total = torch.tensor(own)
    dist.all_reduce(total)
    return int(total)


def test_ranks_that_are_processes_find_each_other():
    assert [(each.code, each.output) for each in on_ranks(2, meet)] == [(0, "0 2 1\n"), (1, "1 2 1\n")]
    assert [each.code for each in main_on_ranks(2, ["--version"])] == [0, 0]


def test_ranks_that_are_threads_meet_and_an_error_on_one_releases_the_others_and_is_raised():
    def work(own: int) -> None:
        if own == 1:
            raise ArithmeticError("on one rank")
        sum_of_ranks(own)

    assert threads(4, sum_of_ranks) == [6] * 4
    with pytest.raises(ArithmeticError, match="on one rank"):
        threads(2, work)
    assert threads(2, sum_of_ranks) == [1, 1]
