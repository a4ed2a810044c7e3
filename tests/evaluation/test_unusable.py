from __future__ import annotations

import pytest

from neuclip.data.faults import FaultLog
from neuclip.data.open import open_source
from neuclip.data.sample import Fault
from neuclip.evaluation.unusable import TooManyBad, list_faults, refuse_above
from neuclip.records import append_line, read_lines
from tests.evaluation.colour_shards import colour_image, write_samples

TWO = (Fault(3, "image does not decode", "a.tar: 3.png"), Fault(-1, "no image", "a.tar: 9.txt", 4))


def faults(count):
    return [Fault(id, "image does not decode", f"a.tar: {id}.png") for id in range(count)]


@pytest.fixture
def twenty(tmp_path):
    return open_source(str(write_samples(tmp_path / "a.tar", [{"png": colour_image("red"), "txt": b"red"}] * 20)))


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


def test_the_share_is_exact(twenty):
    refuse_above(0.05, twenty, faults(1))
    with pytest.raises(TooManyBad, match=r"^a: 2 of 20 samples cannot be used \(10.0%, data.max_bad_share is 5.0%\)"):
        refuse_above(0.05, twenty, faults(2))


def test_a_set_of_which_nothing_is_left_is_refused_whatever_is_allowed(twenty):
    refuse_above(1.0, twenty, faults(19))
    with pytest.raises(TooManyBad):
        refuse_above(1.0, twenty, faults(20))
