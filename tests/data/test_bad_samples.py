"""Bad samples keep their place, are replaced, listed once, and stop a run when they are too many."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from neuclip.data.faults import FaultLog, refuse_bad_source
from neuclip.data.source import Fault
from neuclip.records import read_lines
from tests.builders.data import encoded, failing, image_bytes, lengths, png, write_shards, write_tar
from tests.builders.reading import batches, captions, failure, open_source, read_images


class Holed(list):
    """A source of so many samples that lost something."""

    def __init__(self, faults: tuple[Fault, ...], size: int):
        super().__init__([None] * size)
        self.faults = faults


def read(log: FaultLog, size: int, bad=(), reason: str = "image is empty") -> str:
    """As a run counts a batch of this size in which these ids are bad: why it must stop, or ""."""
    log.add([Fault(id, reason, f"0.tar: {id}.png") for id in bad])
    return log.note(size, len(bad))


def listed(log: FaultLog) -> list[int]:
    return [record["id"] for record in read_lines(log.path)]


@pytest.fixture
def log(tmp_path) -> FaultLog:
    return FaultLog(tmp_path / "skipped.jsonl", limit=0.05)


# The list


def test_each_bad_sample_is_listed_once_over_epochs_and_resumes(log):
    read(log, 64, [1, 2])
    read(log, 64, [2, 3])
    resumed = FaultLog(log.path, limit=0.05)
    assert resumed.counts == {"image is empty": 3}
    read(resumed, 64, [3, 4], "caption is empty")
    assert listed(log) == [1, 2, 3, 4]
    assert read_lines(log.path)[0] == {"id": 1, "reason": "image is empty", "where": "0.tar: 1.png", "times": 1}
    assert resumed.counts == {"image is empty": 3, "caption is empty": 1}


def test_a_line_cut_off_by_a_kill_is_left_out_and_does_not_spoil_the_next(log):
    read(log, 64, [1, 2])
    for cut, left in ((log.path.read_bytes()[:-10], [1, 2, 3]), (b'{"id": 1, "rea', [2, 3])):
        log.path.write_bytes(cut)
        read(FaultLog(log.path, limit=0.05), 64, [2, 3])
        assert listed(log) == left


def test_two_faults_of_one_place_are_two_and_a_name_that_is_not_unicode_is_listed(log):
    found = {"no image": "0.tar: a", "name occurs twice": "0.tar: a", "x": "caf\udce9.tar: \u2028\n"}
    log.add([Fault(-1, reason, where) for reason, where in found.items()])
    assert FaultLog(log.path, limit=0.05).counts == dict.fromkeys(found, 1)
    assert {record["reason"]: record["where"] for record in read_lines(log.path)} == found


# When a run stops


def test_too_many_bad_samples_stop_the_run_with_share_reason_file_and_remedy(log):
    message = read(log, 200, range(40))
    for word in ("20.0%", "image is empty", str(log.path), "--data.max_bad_share", "0.tar: 0.png"):
        assert word in message
    assert "\n" not in message and len(listed(log)) == 40


@pytest.mark.parametrize(
    ("limit", "batches", "stops"),
    [
        (0.05, [(99, 50)], False),  # of few samples a share says little
        (0.05, [(200, 12)], False),  # 6 % of 200 may well be 5 %
        (0.05, [(50, 5)] * 4, True),  # the share is that of what was read: epochs do not hide it
        (0.05, [(4, 1), (4, 0), (4, 1), (4, 1), *[(4, 0)] * 36], False),  # 3 of the first 16 samples, 3 of all 160
        (0.05, [(4, 1), (4, 0), (4, 1), (4, 1), *[(4, 0)] * 36, (200, 30)], True),
        (0.0, [(4, 1)], True),  # at the first
        (1.0, [(1000, 1000)], False),
    ],
)
def test_a_run_stops_when_more_is_bad_than_the_limit_and_chance_explain(tmp_path, limit, batches, stops):
    log = FaultLog(tmp_path / "skipped.jsonl", limit)
    assert [bool(read(log, size, range(bad))) for size, bad in batches] == [False] * (len(batches) - 1) + [stops]


def test_what_could_not_be_indexed_is_listed_and_above_the_share_no_run_is_started(log):
    lost = (Fault(-1, "shard is cut off", "0.tar at byte 512", 80), Fault(-1, "no image", "1.tar: b"))
    log.add(lost)
    assert read(log, 200) == "" and log.counts == {"shard is cut off": 80, "no image": 1} and len(listed(log)) == 2
    refuse_bad_source(Holed(lost, 1400), limit=0.05)
    message = failure(lambda: refuse_bad_source(Holed(lost, 919), limit=0.05))
    start = r"81 of 1,000 pairs \(at least\) could not be indexed \(8\.1%.*: 80 x shard is cut off, 1 x no"
    assert re.match(start, message) and "--data.max_bad_share" in message


# Batches


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_keeps_its_place_and_the_next_readable_one_replaces_it(tmp_path, workers):
    members = {f"{k}.png": image_bytes(k) for k in range(6)} | {f"{k}.txt": f"pair {k}".encode() for k in range(6)}
    members |= {"1.png": b"", "2.png": b"not an image", "4.png": image_bytes(4)[:60]}
    members |= {"5.txt": b"\xff"}  # the last, so 0 replaces 4 and 5
    source = open_source(write_tar(tmp_path / "0.tar", list(members.items())))
    batch = next(batches(source, workers=workers))
    shown = dict(zip(batch.ids.tolist(), batch.tokens[:, 0].tolist(), strict=True))
    assert shown == {0: 0, 1: 3, 2: 3, 3: 3, 4: 0, 5: 0}
    assert {fault.id: (fault.reason, Path(fault.where).name) for fault in batch.faults} == {
        1: ("image is empty", "0.tar: 1.png"),
        2: ("image does not decode", "0.tar: 2.png"),
        4: ("image is cut off", "0.tar: 4.png"),
        5: ("caption is not UTF-8", "0.tar: 5.txt"),
    }
    found = list(read_images(source, batch_size=2, workers=workers))  # evaluation leaves them out
    assert [batch.ids.tolist() for batch in found] == [[0], [3], []]
    assert [fault.id for batch in found for fault in batch.faults] == [1, 2, 4, 5]
    assert not len(found[2].images) and not found[2].captions and not found[2].digests


@pytest.mark.parametrize("workers", [0, 1])
def test_data_without_one_readable_sample_ends_in_one_line(tmp_path, workers):
    source = open_source(write_shards(tmp_path, [5, 1, 9]))
    message = failure(lambda: next(batches(source, transform=failing, workers=workers)))
    assert "image cannot be transformed" in message


def test_evaluation_takes_labelled_images_without_captions_and_training_does_not(tmp_path):
    members = [m for k in range(3) for m in ((f"{k}.png", image_bytes(k)), (f"{k}.cls", str(k).encode()))]
    source = open_source(write_tar(tmp_path / "0.tar", members))
    (batch,) = read_images(source)
    assert len(batch.images) == 3 and not batch.faults and captions(source) == [()] * 3
    assert "caption is missing" in failure(lambda: next(batches(source, batch_size=1)))


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


def test_every_kind_of_bad_sample_keeps_its_id_and_is_listed_under_its_reason(tmp_path, log):
    kinds = {name: (content, b"words", "") for name, content in GOOD.items()} | BAD
    members = [m for name, (image, text, _) in kinds.items() for m in ((f"{name}.png", image), (f"{name}.txt", text))]
    whole = [member for member in members if member[1] is not None]
    shard = write_tar(tmp_path / "0.tar", [*whole, ("without image.txt", b"words")])
    source = open_source(shard)
    log.add(source.faults)
    for one in batches(source, batch_size=13, tokens=lengths, steps=2):
        log.add(one.faults)
        assert sorted(one.ids.tolist()) == list(range(13)) and one.images.shape == (13, 3, 4, 4)
        assert one.tokens.tolist() == [[len("words")]] * 13
    found = {record["id"]: (record["reason"], record["where"]) for record in read_lines(log.path)}
    assert found.pop(-1) == ("no image", f"{shard}: without image")
    expected = {id: reason for id, (_, _, reason) in enumerate(kinds.values()) if reason}
    assert {id: reason for id, (reason, _) in found.items()} == expected
    assert all(where.startswith(f"{shard}: {list(kinds)[id]}.") for id, (_, where) in found.items())
    assert log.counts.total() == len(BAD) + 1 and FaultLog(log.path, limit=0.6).counts == log.counts
