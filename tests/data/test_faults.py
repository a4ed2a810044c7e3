"""Bad samples keep their place, are listed once, and stop a run when they are too many."""

from __future__ import annotations

import re
from dataclasses import dataclass

from PIL import Image

from neuclip.records import read_lines
from tests.builders.data import batch_of as batch
from tests.builders.data import (
    batches,
    encoded,
    failure,
    fault_log,
    image_bytes,
    lengths,
    open_source,
    png,
    refused_for_unindexed,
    unindexed,
    write_tar,
)


@dataclass
class Holed:
    """A source that lost something."""

    faults: tuple
    size: int = 10_000

    def __len__(self) -> int:
        return self.size


def test_each_bad_sample_is_listed_once_over_epochs_and_resumes(tmp_path):
    path = tmp_path / "skipped.jsonl"
    log = fault_log(path, limit=0.5)
    log.note_batch(batch(64, [1, 2]))
    log.note_batch(batch(64, [2, 3]))
    resumed = fault_log(path, limit=0.5)
    assert resumed.counts == {"image is empty": 3}
    resumed.note_batch(batch(64, [3, 4], "caption is empty"))
    assert [record["id"] for record in read_lines(path)] == [1, 2, 3, 4]
    assert read_lines(path)[0] == {"id": 1, "reason": "image is empty", "where": "0.tar: 1.png", "times": 1}
    assert resumed.counts == {"image is empty": 3, "caption is empty": 1}


def test_a_line_cut_off_by_a_kill_is_left_out_and_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "skipped.jsonl"
    fault_log(path, limit=0.5).note_batch(batch(64, [1, 2]))
    path.write_bytes(path.read_bytes()[:-10])
    fault_log(path, limit=0.5).note_batch(batch(64, [2, 3]))
    assert [record["id"] for record in read_lines(path)] == [1, 2, 3]
    path.write_bytes(b'{"id": 1, "rea')
    fault_log(path, limit=0.5).note_batch(batch(64, [1]))
    assert [record["id"] for record in read_lines(path)] == [1]


def test_too_many_bad_samples_stop_the_run_with_share_reason_file_and_remedy(tmp_path):
    log = fault_log(tmp_path / "skipped.jsonl", limit=0.05)
    message = failure(lambda: log.note_batch(batch(200, range(40))))
    assert "20.0%" in message and "image is empty" in message and "skipped.jsonl" in message
    assert "--data.max_bad_share" in message and "0.tar: 0.png" in message
    assert len(read_lines(tmp_path / "skipped.jsonl")) == 40


def test_few_samples_and_chance_do_not_stop_a_run(tmp_path):
    fault_log(tmp_path / "few.jsonl", limit=0.05).note_batch(batch(99, list(range(50))))
    fault_log(tmp_path / "chance.jsonl", limit=0.05).note_batch(
        batch(200, list(range(12)))
    )  # 6 % of 200 may well be 5 %


def test_the_share_is_that_of_what_was_read_so_epochs_do_not_hide_it(tmp_path):
    log = fault_log(tmp_path / "skipped.jsonl", limit=0.05)
    failure(lambda: [log.note_batch(batch(50, [1, 2, 3, 4, 5])) for _ in range(10)])


def test_the_first_bad_samples_of_a_run_do_not_stop_it_however_small_its_batches(tmp_path):
    log = fault_log(tmp_path / "skipped.jsonl", limit=0.05)
    for bad in ([0], [], [1], [0], *[[]] * 36):  # 3 of the first 16 samples, 3 of all 160
        log.note_batch(batch(4, bad))
    failure(lambda: log.note_batch(batch(200, range(30))))


def test_a_limit_of_zero_stops_at_the_first_bad_sample_and_a_limit_of_one_never(tmp_path):
    failure(lambda: fault_log(tmp_path / "skipped.jsonl", limit=0.0).note_batch(batch(4, [1])))
    fault_log(tmp_path / "all.jsonl", limit=1.0).note_batch(batch(1000, list(range(1000))))


def test_a_name_that_is_not_unicode_is_listed(tmp_path):
    fault = unindexed("no image", "caf\udce9.tar: \u2028\n")
    log = fault_log(tmp_path / "skipped.jsonl", limit=0.05)
    log.note_source(Holed((fault,)))
    assert fault_log(log.path, limit=0.05).counts == {"no image": 1}
    assert read_lines(log.path)[0]["where"] == fault.where


def test_two_faults_of_one_place_are_two(tmp_path):
    log = fault_log(tmp_path / "skipped.jsonl", limit=0.05)
    log.note_source(Holed((unindexed("no image", "0.tar: a"), unindexed("name occurs twice", "0.tar: a"))))
    assert log.counts == {"no image": 1, "name occurs twice": 1}


def test_what_could_not_be_indexed_is_listed_and_above_the_share_no_run_is_started(tmp_path):
    faults = (unindexed("shard is cut off", "0.tar at byte 512", 80), unindexed("no image", "1.tar: b"))
    log = fault_log(tmp_path / "skipped.jsonl", limit=0.05)
    log.note_source(Holed(faults, size=1400))
    log.note_batch(batch(200, []))
    assert log.counts == {"shard is cut off": 80, "no image": 1} and len(read_lines(log.path)) == 2
    assert refused_for_unindexed(Holed(faults, size=1400), limit=0.05) == ""
    refusal = refused_for_unindexed(Holed(faults, size=919), limit=0.05)
    assert re.match(
        r"81 of 1,000 pairs \(at least\) could not be indexed \(8\.1%.*: 80 x shard is cut off, 1 x no", refusal
    )
    assert "--data.max_bad_share" in refusal and "\n" not in refusal


GOOD = {
    "jpeg named png": image_bytes(1, "jpg"),
    "cmyk": encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"),
    "sixteen bits": png(2, 2, 16, 0, b"\0\x80\0\x80\0" * 2),
    "palette": encoded(Image.new("P", (8, 8)), transparency=0),
    "alpha": encoded(Image.new("RGBA", (8, 8), (255, 0, 0, 9))),
    "animated": encoded(Image.new("P", (8, 8)), "GIF", save_all=True, append_images=[Image.new("P", (8, 8), 1)]),
}
BAD = {
    "empty": (b"", b"words", "image is empty"),
    "cut off": (image_bytes(2, "jpg", (64, 64))[:-300], b"words", "image is cut off"),
    "a page": (b"<html>404</html>", b"words", "image does not decode"),
    "bomb": (png(50_000, 50_000, 1, 0, bytes(99)), b"words", "image is too large"),
    "without caption": (image_bytes(3), None, "caption is missing"),
    "no words": (image_bytes(4), b" \n", "caption is empty"),
    "latin-1": (image_bytes(5), "caf\u00e9".encode("latin-1"), "caption is not UTF-8"),
}


def test_every_kind_of_bad_sample_keeps_its_id_and_is_listed_under_its_reason(tmp_path):
    kinds = {name: (content, b"words", "") for name, content in GOOD.items()} | BAD
    members = [
        member
        for name, (image, caption, _) in kinds.items()
        for member in ((f"{name}.png", image), *([(f"{name}.txt", caption)] if caption is not None else []))
    ]
    source = open_source(str(write_tar(tmp_path / "0.tar", [*members, ("without image.txt", b"words")])))
    log = fault_log(tmp_path / "skipped.jsonl", limit=0.6)
    log.note_source(source)
    for one in batches(source, batch_size=13, tokens=lengths, steps=2):
        log.note_batch(one)
        assert sorted(one.ids.tolist()) == list(range(13)) and one.images.shape == (13, 3, 4, 4)
        assert one.tokens.tolist() == [[len("words")]] * 13
    found = {record["id"]: (record["reason"], record["where"]) for record in read_lines(log.path)}
    shard = tmp_path / "0.tar"
    assert found.pop(-1) == ("no image", f"{shard}: without image")
    assert {id: reason for id, (reason, _) in found.items()} == {
        id: reason for id, (_, _, reason) in enumerate(kinds.values()) if reason
    }
    assert all(where.startswith(f"{shard}: {list(kinds)[id]}.") for id, (_, where) in found.items())
    assert log.counts.total() == len(BAD) + 1 and fault_log(log.path, limit=0.6).counts == log.counts
