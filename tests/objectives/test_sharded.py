"""Rows in blocks: what a rank keeps, saves and loads. Several real ranks: tests/processes/test_ranks.py."""

from __future__ import annotations

import pytest
import torch
from neuclip.objectives.normalizers import sharded
from neuclip.objectives.normalizers.sharded import ShardedRows

from neuclip.distributed import collectives


def rows_of(size: int) -> ShardedRows:
    rows = ShardedRows(size)
    rows.add_rows("values", 3, fill=0.5)
    rows.add_rows("owners", fill=-1)
    return rows


def as_rank(monkeypatch, rank: int, ranks: int) -> None:
    monkeypatch.setattr(collectives, "rank", lambda: rank)
    monkeypatch.setattr(collectives, "world_size", lambda: ranks)
    assert sharded.local_range(7) == collectives.local_range(7)


def test_rows_start_from_their_fill_and_its_type():
    rows = rows_of(7)
    assert rows.values.shape == (7, 3) and rows.values.dtype == torch.float32 and (rows.values == 0.5).all()
    assert rows.owners.shape == (7,) and rows.owners.dtype == torch.int64 and (rows.owners == -1).all()


def test_blocks_are_no_buffers_but_move_with_the_module():
    rows = rows_of(4).double()
    assert list(rows.buffers()) == [] and rows.values.dtype == torch.float64 and rows.owners.dtype == torch.int64


def test_what_was_built_alone_keeps_its_block_once_there_are_ranks(monkeypatch):
    rows = rows_of(7)
    rows.owners.copy_(torch.arange(7))
    as_rank(monkeypatch, rank=1, ranks=3)
    rows.reshard()
    assert rows.owners.tolist() == [3, 4] and rows.share == range(3, 5)
    as_rank(monkeypatch, rank=0, ranks=2)
    with pytest.raises(RuntimeError, match="number of ranks changed"):
        rows.reshard()


@pytest.mark.parametrize(("rank", "want"), [(0, [0, 1, 2]), (1, [3, 4]), (2, [5, 6])])
def test_a_whole_state_loads_as_the_block_of_a_rank(rank, want, monkeypatch):
    whole = rows_of(7)
    whole.owners.copy_(torch.arange(7))
    state = whole.state_dict()
    as_rank(monkeypatch, rank=rank, ranks=3)
    mine = rows_of(7)
    mine.load_state_dict(state)
    assert mine.owners.tolist() == want and len(mine.values) == len(want)


def test_a_saved_state_does_not_change_with_the_rows():
    rows = rows_of(3)
    state = rows.state_dict()
    rows.values.zero_()
    assert (state["values"] == 0.5).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("owners"), "owners"),
        (lambda state: state.update(values=torch.zeros(4, 3)), r"shape \(4, 3\), not \(7, 3\)"),
        (lambda state: state.update(more=torch.zeros(1)), "more"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, message):
    state = rows_of(7).state_dict()
    change(state)
    with pytest.raises(RuntimeError, match=message):
        rows_of(7).load_state_dict(state)
