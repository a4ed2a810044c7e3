"""The table by sample id: what is never written, what is zero, files, types, and state."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from neuclip.objectives.normalizers.table import SampleTable, decode, encode
from torch import Tensor

from neuclip.errors import RunFailed

COLUMNS = ("left", "right")


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=9.0), b.nan_to_num(nan=9.0))


@pytest.mark.parametrize("in_file", [False, True])
def test_what_was_written_comes_back_and_the_rest_is_not_a_number(in_file, tmp_path):
    table = SampleTable(10, COLUMNS, tmp_path / "new folder" / "table" if in_file else None)
    assert table.read(ids(0, 9)).isnan().all()
    table.write(ids(7, 2), torch.tensor([[0.0, -3.5], [-math.inf, 1e-30]]))
    assert same(table.read(ids(2, 3, 7)), torch.tensor([[-math.inf, 1e-30], [math.nan] * 2, [0.0, -3.5]]))


@given(st.lists(st.floats(width=32), max_size=20))
def test_every_number_survives_the_mark_for_never_written(numbers):
    values = torch.tensor(numbers, dtype=torch.float32)
    kept = encode(values)
    assert same(decode(kept), values)
    zero_bytes = kept.view(torch.int32) == 0
    assert torch.equal(zero_bytes, values.isnan())


def test_a_hundred_million_samples_in_a_file_take_room_only_where_they_were_written(tmp_path):
    table = SampleTable(10**8, COLUMNS, tmp_path / "table")
    table.write(ids(5, 10**8 - 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert same(table.read(ids(10**8 - 1, 6)), torch.tensor([[3.0, 4.0], [math.nan, math.nan]]))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == 8 * 10**8 and file.stat().st_blocks * 512 < 10**6


def test_reading_makes_no_file(tmp_path):
    table = SampleTable(10, COLUMNS, tmp_path / "table")
    table.read(ids(1))
    table.state_dict()
    assert list(tmp_path.iterdir()) == []


def test_a_new_table_does_not_inherit_the_file_of_an_old_one(tmp_path):
    old = SampleTable(10, COLUMNS, tmp_path / "table")
    old.write(ids(1), torch.ones(1, 2))
    new = SampleTable(10, COLUMNS, tmp_path / "table")
    new.write(ids(2), torch.ones(1, 2))
    assert new.read(ids(1)).isnan().all()
    assert torch.equal(old.read(ids(1)), torch.ones(1, 2)) and old.read(ids(2)).isnan().all()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunFailed, match=r"cannot create the table .*file/table\.0-of-1 .* table_path"):
        SampleTable(10, COLUMNS, tmp_path / "file" / "table").write(ids(1), torch.ones(1, 2))


def test_a_table_larger_than_the_disk_is_refused_before_it_is_made(tmp_path):
    with pytest.raises(RunFailed, match="GB needed"):
        SampleTable(10**16, COLUMNS, tmp_path / "table").write(ids(1), torch.ones(1, 2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [-1, 10, 10**12])
def test_an_id_outside_is_named_with_the_size_and_writes_nothing(wrong):
    table = SampleTable(10, COLUMNS)
    for call in (lambda: table.read(ids(3, wrong, -7)), lambda: table.write(ids(3, wrong, -7), torch.ones(3, 2))):
        with pytest.raises(ValueError, match=rf"sample id {wrong} is outside 0\.\.9, for dataset_size=10;"):
            call()
    assert table.read(ids(3)).isnan().all()


@pytest.mark.parametrize("in_file", [False, True])
def test_the_type_changes_with_what_is_kept_and_never_below_float32(in_file, tmp_path):
    table = SampleTable(4, COLUMNS, tmp_path / "table" if in_file else None)
    table.write(ids(1), torch.tensor([[0.0, 0.5]]))
    for change, dtype in ((table.double, torch.float64), (table.half, torch.float32), (table.double, torch.float64)):
        change()
        assert table.read(ids(0)).dtype == dtype
        assert same(table.read(ids(1, 2)), torch.tensor([[0.0, 0.5], [math.nan, math.nan]], dtype=dtype))


def test_it_is_no_buffer_and_no_parameter():
    table = SampleTable(4, COLUMNS)
    table.write(ids(1), torch.ones(1, 2))
    assert list(table.buffers()) == [] and list(table.parameters()) == []


def test_state_holds_whole_columns_in_id_order_and_loads_as_precisely_as_it_was_saved():
    table = SampleTable(4, COLUMNS).double()
    assert all(column.isnan().all() for column in table.state_dict().values())
    table.write(ids(2, 0), torch.tensor([[0.0, 1 / 3], [1.0, 2.0]], dtype=torch.float64))
    state = table.state_dict()
    assert same(state["left"], torch.tensor([1.0, math.nan, 0.0, math.nan], dtype=torch.float64))
    other = SampleTable(4, COLUMNS)
    other.write(ids(3), torch.ones(1, 2))  # to be forgotten
    other.load_state_dict(state)
    assert same(other.read(ids(0, 1, 2, 3)), table.read(ids(0, 1, 2, 3)))


def test_state_of_another_size_or_with_other_columns_is_refused():
    state = SampleTable(4, COLUMNS).state_dict()
    with pytest.raises(RuntimeError, match="the table is of 4 samples; this objective was made with dataset_size=5"):
        SampleTable(5, COLUMNS).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"right"'):
        SampleTable(4, ("left",)).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Missing key.*"other"'):
        SampleTable(4, (*COLUMNS, "other")).load_state_dict(state)
