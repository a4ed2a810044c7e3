"""The builders of processes and ranks do what they promise to other tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from neuclip.distributed.collectives import (
    all_gather_int,
    any_rank,
    gather_rows,
    gather_values,
    rank,
    scatter_sum,
    sum_over_ranks,
    world_size,
)
from tests.builders.images import write_csv
from tests.builders.processes import main_killed_at_write, main_on_ranks, on_ranks, run, start, threads


def surroundings() -> int:
    print(os.environ["COLOUR"], Path.cwd(), "open_clip" in sys.modules)
    print("a warning", file=sys.stderr)
    return 7


def test_a_child_has_this_environment_and_folder_and_has_imported_open_clip(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOUR", "red")
    ended = run(surroundings)
    assert (ended.code, ended.output, ended.errors) == (7, f"red {tmp_path} True\n", "a warning\n")
    assert run(surroundings, COLOUR="blue").output.startswith("blue")


def fails() -> None:
    raise ArithmeticError("of its own")


def test_an_exception_is_a_traceback_and_exit_code_1():
    ended = run(fails)
    assert ended.code == 1
    assert "ArithmeticError: of its own" in ended.errors


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
    table = write_csv(tmp_path, 3)
    convert = ["data", "convert", str(table)]
    assert main_killed_at_write(1, [*convert, str(tmp_path / "first")]).code == -signal.SIGKILL
    assert main_killed_at_write(1000, [*convert, str(tmp_path / "second")]).code == 0  # so many writes do not come


def meet() -> int:
    from torch import distributed

    distributed.init_process_group("gloo")
    total = sum_over_ranks(torch.tensor(float(rank() + 1)))
    own = rank()
    print(own, world_size(), float(total))
    distributed.destroy_process_group()
    return own


def test_ranks_that_are_processes_find_each_other():
    assert [(each.code, each.output) for each in on_ranks(2, meet)] == [(0, "0 2 3.0\n"), (1, "1 2 3.0\n")]
    assert [each.code for each in main_on_ranks(2, ["--version"])] == [0, 0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_are_threads_gather_sum_and_scatter(ranks):
    def work(own: int) -> tuple:
        rows = torch.full((2, 1), float(own))
        assert (rank(), world_size()) == (own, ranks)
        return (
            gather_values(rows).flatten().tolist(),
            scatter_sum(torch.arange(ranks).double()[:, None]).tolist(),
            sum_over_ranks(torch.tensor(own)).item(),
            all_gather_int(own),
            any_rank(own == 1),
            len(gather_rows(rows[: own % 2])),
        )

    found = threads(ranks, work)
    for own in range(ranks):
        everyone = [float(k) for k in range(ranks) for _ in range(2)]
        numbers = list(range(ranks))
        assert found[own] == (everyone, [[float(own * ranks)]], sum(numbers), numbers, True, ranks // 2)
    assert world_size() == 1


def test_an_error_on_one_thread_releases_the_others_and_is_raised():
    def work(own: int) -> None:
        if own == 1:
            raise ArithmeticError("on one rank")
        sum_over_ranks(torch.ones(1))

    with pytest.raises(ArithmeticError, match="on one rank"):
        threads(2, work)
    assert threads(2, rank_of) == [0, 1]


def rank_of(own: int) -> int:
    return rank()
