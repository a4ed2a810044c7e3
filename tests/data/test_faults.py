"""Bad samples keep their place, are listed once, and stop a run when they are too many."""

from __future__ import annotations

import pytest
import torch

from neuclip.data.faults import FaultLog, stand_ins
from neuclip.data.sample import Batch, Fault
from neuclip.errors import RunFailed
from neuclip.records import read_lines


def batch(size: int, bad: list[int], reason: str = "picture is empty") -> Batch:
    faults = tuple(Fault(id, reason, f"0.tar: {id}.png") for id in bad)
    return Batch(torch.zeros(size, 3, 1, 1), torch.zeros(size, 1), torch.arange(size), faults)


def test_stand_ins_are_the_next_samples_and_never_the_bad_one():
    assert stand_ins(3, 5) == [4, 0, 1, 2]
    assert stand_ins(0, 1) == []
    assert len(stand_ins(7, 10**9)) == 100


def test_each_bad_sample_is_listed_once_over_epochs_and_resumes(tmp_path):
    path = tmp_path / "skipped.jsonl"
    log = FaultLog(path, limit=0.5)
    log.note(batch(64, [1, 2]))
    log.note(batch(64, [2, 3]))
    resumed = FaultLog(path, limit=0.5)
    assert resumed.counts == {"picture is empty": 3}
    resumed.note(batch(64, [3, 4], "caption is empty"))
    assert [record["id"] for record in read_lines(path)] == [1, 2, 3, 4]
    assert read_lines(path)[0] == {"id": 1, "reason": "picture is empty", "where": "0.tar: 1.png"}
    assert resumed.counts == {"picture is empty": 3, "caption is empty": 1}


def test_a_line_cut_off_by_a_kill_is_left_out_and_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "skipped.jsonl"
    FaultLog(path, limit=0.5).note(batch(64, [1, 2]))
    path.write_bytes(path.read_bytes()[:-10])
    FaultLog(path, limit=0.5).note(batch(64, [2, 3]))
    assert [record["id"] for record in read_lines(path)] == [1, 2, 3]
    path.write_bytes(b'{"id": 1, "rea')
    FaultLog(path, limit=0.5).note(batch(64, [1]))
    assert [record["id"] for record in read_lines(path)] == [1]


def test_too_many_bad_samples_stop_the_run_with_share_reason_file_and_remedy(tmp_path):
    log = FaultLog(tmp_path / "skipped.jsonl", limit=0.05)
    with pytest.raises(RunFailed) as caught:
        log.note(batch(200, list(range(40))))
    message = str(caught.value)
    assert "20.0%" in message and "picture is empty" in message and "skipped.jsonl" in message
    assert "--data.max_bad_share" in message and "\n" not in message
    assert len(read_lines(tmp_path / "skipped.jsonl")) == 40


def test_few_samples_and_chance_do_not_stop_a_run(tmp_path):
    FaultLog(tmp_path / "few.jsonl", limit=0.05).note(batch(99, list(range(50))))
    FaultLog(tmp_path / "chance.jsonl", limit=0.05).note(batch(200, list(range(12))))  # 6 % of 200 may well be 5 %


def test_the_share_is_that_of_what_was_read_so_epochs_do_not_hide_it(tmp_path):
    log = FaultLog(tmp_path / "skipped.jsonl", limit=0.05)
    with pytest.raises(RunFailed):
        for _ in range(100):
            log.note(batch(50, [1, 2, 3, 4, 5]))
    assert log.read <= 500


def test_a_limit_of_zero_stops_at_the_first_bad_sample(tmp_path):
    with pytest.raises(RunFailed):
        FaultLog(tmp_path / "skipped.jsonl", limit=0.0).note(batch(100, [1]))


def test_what_never_became_a_sample_is_listed_and_takes_no_part_in_the_share(tmp_path):
    class Holed:
        faults = (Fault(-1, "no picture", "0.tar: a"), Fault(-1, "no picture", "1.tar: b"))

    log = FaultLog(tmp_path / "skipped.jsonl", limit=0.0)
    log.note_source(Holed())
    log.note_source(Holed())
    log.note(batch(200, []))
    assert log.counts == {"no picture": 2} and len(read_lines(tmp_path / "skipped.jsonl")) == 2
