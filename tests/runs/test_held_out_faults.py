"""Bad samples of held-out sets in a run's skipped.jsonl."""

from __future__ import annotations

from neuclip.data.faults import FaultLog
from neuclip.data.source import Fault
from neuclip.records import append_line, read_lines
from neuclip.runs.results import list_faults

TWO = (Fault(3, "image does not decode", "a.tar: 3.png"), Fault(-1, "no image", "a.tar: 9.txt", 4))


def test_faults_of_later_evaluations_are_listed_once_and_sets_are_told_apart(tmp_path):
    path = tmp_path / "skipped.jsonl"
    list_faults(path, {"a": TWO, "b": (), "c": TWO[:1]})
    list_faults(path, {"a": TWO, "c": TWO})
    assert [(line["held_out"], line["id"]) for line in read_lines(path)] == [("a", 3), ("a", -1), ("c", 3), ("c", -1)]
    assert read_lines(path)[1] == TWO[1]._asdict() | {"held_out": "a"}


def test_no_file_is_made_where_nothing_is_bad(tmp_path):
    list_faults(tmp_path / "skipped.jsonl", {"a": ()})
    assert not (tmp_path / "skipped.jsonl").exists()


def test_held_out_faults_are_no_faults_of_the_training_data(tmp_path):
    path = tmp_path / "skipped.jsonl"
    append_line(path, Fault(0, "caption is empty", "t.tar: 0")._asdict())
    list_faults(path, {"a": TWO})
    log = FaultLog(path, limit=0.05)
    assert log.counts == {"caption is empty": 1}
    log.add([Fault(3, "image is cut off", "t.tar: 3")])  # of the same number as one of the held-out set
    assert log.counts.total() == 2 and len(read_lines(path)) == 4
