"""Bad samples keep their place, are listed once, and stop a run when they are too many."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from neuclip.data.sample import Batch, Fault, UnindexedFaults
from PIL import Image

from neuclip.data.faults import FaultLog, replacements, too_many_unindexed
from neuclip.data.loader import Batches
from neuclip.data.open import open_source
from neuclip.data.order import Order
from neuclip.errors import RunFailed
from neuclip.records import read_lines
from tests.data.small_shards import encoded, image_bytes, png, write_tar
from tests.data.small_transforms import plain


def batch(size: int, bad: list[int], reason: str = "image is empty") -> Batch:
    faults = tuple(Fault(id, reason, f"0.tar: {id}.png") for id in bad)
    return Batch(torch.zeros(size, 3, 1, 1), torch.zeros(size, 1), torch.arange(size), faults)


@dataclass
class Holed:
    """A source that lost something."""

    faults: tuple[Fault, ...]
    size: int = 10_000

    def __len__(self) -> int:
        return self.size


def test_replacements_are_the_next_samples_and_never_the_bad_one():
    assert replacements(3, 5) == [4, 0, 1, 2]
    assert replacements(0, 1) == []
    assert len(replacements(7, 10**9)) == 100


def test_each_bad_sample_is_listed_once_over_epochs_and_resumes(tmp_path):
    path = tmp_path / "skipped.jsonl"
    log = FaultLog(path, limit=0.5)
    log.note(batch(64, [1, 2]))
    log.note(batch(64, [2, 3]))
    resumed = FaultLog(path, limit=0.5)
    assert resumed.counts == {"image is empty": 3}
    resumed.note(batch(64, [3, 4], "caption is empty"))
    assert [record["id"] for record in read_lines(path)] == [1, 2, 3, 4]
    assert read_lines(path)[0] == {"id": 1, "reason": "image is empty", "where": "0.tar: 1.png", "times": 1}
    assert resumed.counts == {"image is empty": 3, "caption is empty": 1}


def test_known_bad_samples_cost_eight_bytes_each(tmp_path, monkeypatch):
    monkeypatch.setattr("neuclip.data.faults.MERGED_FROM", 50)
    path = tmp_path / "skipped.jsonl"
    ids = [id * 7919 % 3001 for id in range(3000)]  # not in order
    lines = "".join(f'{{"id": {id}, "reason": "image is empty", "where": "0.tar", "times": 1}}\n' for id in ids)
    path.write_text(lines)
    log = FaultLog(path, limit=1)
    assert log.counts == {"image is empty": 3000}
    assert log._known._sorted.nbytes + 8 * len(log._known._newest) == 8 * 3000 and len(log._known._newest) < 400
    log.note(batch(3000, ids[::3]))
    assert path.read_text() == lines and log.counts.total() == 3000
    log.note(batch(64, [5000, 5001]))
    assert [record["id"] for record in read_lines(path)][3000:] == [5000, 5001]


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
    assert "20.0%" in message and "image is empty" in message and "skipped.jsonl" in message
    assert "--data.max_bad_share" in message and "\n" not in message and "first: 0.tar: 0.png" in message
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


def test_the_first_bad_samples_of_a_run_do_not_stop_it_however_small_its_batches(tmp_path):
    log = FaultLog(tmp_path / "skipped.jsonl", limit=0.05)
    for bad in ([0], [], [1], [0], *[[]] * 36):  # 3 of the first 16 samples, 3 of all 160
        log.note(batch(4, bad))
    assert (log.read, log.bad) == (160, 3)


def test_a_limit_of_zero_stops_at_the_first_bad_sample_and_a_limit_of_one_never(tmp_path):
    with pytest.raises(RunFailed):
        FaultLog(tmp_path / "skipped.jsonl", limit=0.0).note(batch(4, [1]))
    FaultLog(tmp_path / "all.jsonl", limit=1.0).note(batch(1000, list(range(1000))))


def test_a_name_that_is_not_unicode_is_listed(tmp_path):
    fault = Fault(-1, "no image", "caf\udce9.tar: \u2028\n")
    log = FaultLog(tmp_path / "skipped.jsonl", limit=0.05)
    log.note_source(Holed((fault,)))
    assert FaultLog(log.path, limit=0.05).counts == {"no image": 1}
    assert read_lines(log.path)[0]["where"] == fault.where


def test_what_has_no_id_is_counted_one_by_one_however_much_of_it_there_is(tmp_path):
    lost = UnindexedFaults()
    for number in range(30):
        lost.note("no image", f"0.tar: {number}")
    lost.note("name occurs twice", "0.tar: a.png")
    lost.note("name occurs twice", "0.tar: a.png")
    lost.note("shard is damaged", "0.tar at byte 512", 7)

    log = FaultLog(tmp_path / "skipped.jsonl", limit=0.05)
    log.note_source(Holed(lost.faults()))
    expected = {"no image": 30, "name occurs twice": 2, "shard is damaged": 7}
    assert log.counts == FaultLog(log.path, limit=0.05).counts == expected
    places = [record["where"] for record in read_lines(log.path)]
    assert places[:2] == ["0.tar: 0", "0.tar: 1"] and places[9] == "0.tar: 9 and 20 more" and len(places) == 12


def test_two_faults_of_one_place_are_two(tmp_path):
    log = FaultLog(tmp_path / "skipped.jsonl", limit=0.05)
    log.note_source(Holed((Fault(-1, "no image", "0.tar: a"), Fault(-1, "name occurs twice", "0.tar: a"))))
    assert log.counts == {"no image": 1, "name occurs twice": 1}


def test_what_could_not_be_indexed_is_listed_and_above_the_share_no_run_is_started(tmp_path):
    faults = (Fault(-1, "shard is cut off", "0.tar at byte 512", 80), Fault(-1, "no image", "1.tar: b"))
    log = FaultLog(tmp_path / "skipped.jsonl", limit=0.05)
    log.note_source(Holed(faults, size=1400))
    log.note(batch(200, []))
    assert log.counts == {"shard is cut off": 80, "no image": 1} and len(read_lines(log.path)) == 2
    assert too_many_unindexed(Holed(faults, size=1400), limit=0.05) == ""
    refusal = too_many_unindexed(Holed(faults, size=919), limit=0.05)
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


def words(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption)] for caption in captions])


def test_every_kind_of_bad_sample_keeps_its_id_and_is_listed_under_its_reason(tmp_path):
    kinds = {name: (content, b"words", "") for name, content in GOOD.items()} | BAD
    members = [
        member
        for name, (image, caption, _) in kinds.items()
        for member in ((f"{name}.png", image), *([(f"{name}.txt", caption)] if caption is not None else []))
    ]
    source = open_source(str(write_tar(tmp_path / "0.tar", [*members, ("without image.txt", b"words")])))
    batches = Batches(
        source, Order(13, seed=0), batch_size=13, transform=plain, tokenize=words, seed=0, workers=0
    ).steps(0, 2)  # fmt: skip
    log = FaultLog(tmp_path / "skipped.jsonl", limit=0.6)
    log.note_source(source)
    for batch in batches:
        log.note(batch)
        assert sorted(batch.ids.tolist()) == list(range(13)) and batch.images.shape == (13, 3, 4, 4)
        assert batch.tokens.tolist() == [[len("words")]] * 13
    found = {record["id"]: (record["reason"], record["where"]) for record in read_lines(log.path)}
    shard = tmp_path / "0.tar"
    assert found.pop(-1) == ("no image", f"{shard}: without image")
    assert {id: reason for id, (reason, _) in found.items()} == {
        id: reason for id, (_, _, reason) in enumerate(kinds.values()) if reason
    }
    assert all(where.startswith(f"{shard}: {list(kinds)[id]}.") for id, (_, where) in found.items())
    assert log.counts.total() == len(BAD) + 1 and (log.read, log.bad) == (26, 2 * len(BAD))
