"""Stored features of locked towers: the same run to the bit, whatever happens while they are stored."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from neuclip import api
from neuclip.data import features as store
from neuclip.data.tables.listed import ListedPairs
from neuclip.errors import RunFailed
from neuclip.records import RunFolder, read_lines
from neuclip.runs.folder import checkpoints_in, load_checkpoint
from neuclip.settings.reading import read_settings
from neuclip.training import stored_features
from tests.builders.images import caption, image_bytes
from tests.builders.models import SMALL_FILE
from tests.builders.processes import run

IMAGE, TEXT = ["--model.image_tower", "locked", "--data.crop_scale", "1,1"], ["--model.text_tower", "locked"]
COUNT, BAD_IMAGE, NO_CAPTION = 40, 7, 20
OFF = ["--data.stored_features", "off"]


@pytest.fixture
def features(cache) -> Path:
    """Where features are stored."""
    return cache / "features"


@pytest.fixture
def table(tmp_path) -> Path:
    """Images with one to three captions each; one does not decode, one has no caption."""
    lines = []
    for number in range(COUNT):
        (tmp_path / f"{number}.png").write_bytes(b"bad" if number == BAD_IMAGE else image_bytes(number))
        captions = [caption(number), f"{caption(number)} {number}", "a shape"][: 1 + number % 3]
        lines.append(json.dumps({"image": f"{number}.png", "caption": [] if number == NO_CAPTION else captions}))
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def flags(table, tmp_path):
    def make(name: str, *more: str) -> list[str]:
        fixed = f"""--run.folder {tmp_path}/runs --run.name {name} --run.threads 1 --data.workers 0 --data.train {table}
            --data.max_bad_share 0.2 --model.name {SMALL_FILE} --train.batch_size 8 --train.samples 96
            --objective.num_prototypes 16 --evaluation.every 0 --evaluation.error_anchors 0 --log.every 1""".split()
        return [*fixed, *more]

    return make


@pytest.fixture
def train(flags):
    return lambda name, *more: api.train(read_settings(None, flags(name, *more)))


def assert_equal_runs(one: Path, other: Path) -> None:
    """Weights, records and skipped samples, to the bit."""
    first, second = (load_checkpoint(checkpoints_in(RunFolder(run))[-1])["model"] for run in (one, other))
    assert all(torch.equal(first[name], second[name]) for name in first)
    timed = ("_share", "per_second")
    records = [
        [{key: x for key, x in line.items() if not key.endswith(timed)} for line in read_lines(RunFolder(run).records)]
        for run in (one, other)
    ]
    assert records[0] == records[1]
    assert read_lines(RunFolder(one).skipped) == read_lines(RunFolder(other).skipped)


def count_computed(monkeypatch) -> list[int]:
    """Grows by the first sample of each block that is computed."""
    compute, blocks = stored_features._compute, []

    def counted(run, side, start, samples, batch):
        blocks.append(start)
        return compute(run, side, start, samples, batch)

    monkeypatch.setattr(stored_features, "_compute", counted)
    return blocks


def sides(run: Path) -> list[str]:
    return json.loads(RunFolder(run).summary.read_text())["stored_features"]


@pytest.mark.parametrize(
    ("locked", "stored"),
    [([*IMAGE, *TEXT], ["image", "text"]), (IMAGE, ["image"]), (TEXT, ["text"])],
    ids=["both", "image", "text"],
)
def test_a_run_on_stored_features_equals_one_that_computes_them_to_the_bit(train, locked, stored):
    first, computed = train("first", *locked), train("computed", *locked, *OFF)
    assert sides(first) == stored and sides(computed) == []
    assert_equal_runs(first, computed)
    assert {line["reason"] for line in read_lines(RunFolder(first).skipped)} == {
        "image does not decode",
        "caption is missing",
    }


def test_with_both_towers_locked_a_second_run_reads_bad_samples_alone_whatever_is_held_out(train, monkeypatch):
    train("first", *IMAGE, *TEXT)
    read = ListedPairs.__getitem__

    def refuse(self, id):
        assert id in (BAD_IMAGE, NO_CAPTION), f"sample {id} was read"
        return read(self, id)

    monkeypatch.setattr(ListedPairs, "__getitem__", refuse)
    second = train("second", *IMAGE, *TEXT, "--data.hold_out", "8", "--evaluation.retrieval", "")
    assert json.loads(RunFolder(second).summary.read_text())["samples_seen"] == 96


def test_features_are_stored_by_weights_and_images(train, features, table):
    train("first", *IMAGE)
    assert len(list(features.iterdir())) == 1
    train("again", *IMAGE, "--data.hold_out", "8", "--evaluation.retrieval", "")  # the same weights and files
    assert len(list(features.iterdir())) == 1
    train("other-weights", *IMAGE, "--run.seed", "1")
    assert len(list(features.iterdir())) == 2
    (table.parent / "3.png").write_bytes(image_bytes(4))
    changed, computed = train("changed", *IMAGE), train("computed", *IMAGE, *OFF)
    assert len(list(features.iterdir())) == 3
    assert_equal_runs(changed, computed)


def train_killed_in_third_block(flags: list[str]) -> None:
    """Between the rows of its third block and what says that they are there."""
    checksum, blocks = store._checksum, []

    def killing(counts, rows):
        blocks.append(counts)
        if len(blocks) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return checksum(counts, rows)

    stored_features.BLOCK = {"image": 8, "text": 8}
    store._checksum = killing
    api.train(read_settings(None, flags))


@pytest.mark.slow
def test_what_a_kill_left_half_written_is_computed_again_and_nothing_else(train, flags, monkeypatch):
    killed = run(train_killed_in_third_block, flags("killed", *TEXT))
    assert killed.code == -signal.SIGKILL, killed.errors
    monkeypatch.setattr(stored_features, "BLOCK", {"image": 8, "text": 8})
    computed = count_computed(monkeypatch)
    after = train("after", *TEXT)
    assert computed == [16, 24, 32]
    assert_equal_runs(after, train("computed", *TEXT, *OFF))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_link_in_place_of_the_store_is_not_followed_and_ends_the_run_in_one_line(train, features):
    train("first", *IMAGE)
    (stored,) = features.glob("*/features.*")
    (stored.parent / "counts").unlink()
    stored.unlink()
    stored.symlink_to("/dev/full")
    with pytest.raises(RunFailed, match=r"cannot be stored \(Too many levels of symbolic links\); .*features off"):
        train("full", *IMAGE)
    stored.unlink()
    assert_equal_runs(train("after", *IMAGE), train("computed", *IMAGE, *OFF))


DAMAGES = {
    "flipped": lambda rows: rows[17].__imul__(2),
    "exchanged": lambda rows: rows.__setitem__([17, 18], rows[[18, 17]]),
    "zeros": lambda rows: rows[17].fill(0),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "cut off", "gone"])
def test_rows_that_are_not_as_they_were_written_are_computed_again(train, features, monkeypatch, damage):
    monkeypatch.setattr(stored_features, "BLOCK", {"image": 8, "text": 8})
    first = train("first", *IMAGE)
    (file,) = features.glob("*/features.*")
    rows = np.fromfile(file, "<f4").reshape(-1, int(file.suffix[1:]))
    if damage in DAMAGES:
        DAMAGES[damage](rows)
    file.unlink() if damage == "gone" else rows[: 20 if damage == "cut off" else None].tofile(file)
    computed = count_computed(monkeypatch)
    assert_equal_runs(first, train("again", *IMAGE))
    assert computed == ([16] if damage in DAMAGES else [16, 24, 32] if damage == "cut off" else [0, 8, 16, 24, 32])


def test_features_for_which_there_is_no_room_are_refused_after_the_first_block(train, cache, monkeypatch):
    usage = shutil.disk_usage
    little = usage("/")._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: little if str(cache) in str(place) else usage(place))
    with pytest.raises(RunFailed, match=r"\([\d.]+ kB are needed and 100 bytes free\); free some space"):
        train("full", *IMAGE)


def test_a_run_that_sees_no_sample_twice_stores_nothing(train, features):
    train("short", *IMAGE, *TEXT, "--train.samples", "40")
    assert not features.exists()


def test_a_resumed_run_may_change_whether_features_are_stored(train, flags):
    whole = train("whole", *TEXT)
    half = read_settings(None, [*flags("half", *TEXT), "--checkpoint.every_samples", "48", "--checkpoint.keep", "9"])
    folder = RunFolder(api.train(half))
    for late in checkpoints_in(folder)[2:]:
        late.unlink()
    api.train(read_settings(folder.settings, OFF), resume=folder.path)
    assert_equal_runs(whole, folder.path)
