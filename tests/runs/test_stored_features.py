"""Stored features of locked towers: the same run to the bit, whatever happens while they are stored."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from neuclip import api
from neuclip.errors import RunFailed
from neuclip.records import RunFolder, read_lines
from neuclip.runs.folder import checkpoints_in
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings
from neuclip.training import stored_features
from tests.builders import processes
from tests.builders.images import BAD_IMAGE, NO_CAPTION, image_bytes, write_csv
from tests.builders.images import TABLE_SIZE as COUNT
from tests.builders.models import SMALL_FILE
from tests.builders.processes import at_write
from tests.builders.runs import assert_equal_runs, settings_for, summary

IMAGE, TEXT = ["--model.image_tower", "locked", "--data.crop_scale", "1,1"], ["--model.text_tower", "locked"]
OFF = ["--data.stored_features", "off"]
BLOCK = {"image": 8, "text": 8}


@pytest.fixture
def features(cache) -> Path:
    """Where features are stored."""
    return cache / "features"


def settings_of(table: Path, name: str, *flags: str) -> Settings:
    some = ["--run.name", name, "--data.max_bad_share", "0.2", *flags]
    return settings_for(table.parent / "runs", table, *some, model=SMALL_FILE)


@pytest.fixture
def train(table):
    return lambda name, *flags: api.train(settings_of(table, name, *flags))


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """Grows by the number of each image that is read."""
    real, numbers = os.open, []

    def noted(path, *arguments, **options):
        if str(path).endswith(".png"):
            numbers.append(int(Path(path).stem))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", noted)
    return numbers


@pytest.mark.parametrize(
    ("locked", "stored"),
    [([*IMAGE, *TEXT], ["image", "text"]), (IMAGE, ["image"]), (TEXT, ["text"])],
    ids=["both", "image", "text"],
)
def test_a_run_on_stored_features_equals_one_that_computes_them_to_the_bit(train, locked, stored):
    first, computed = train("first", *locked), train("computed", *locked, *OFF)
    assert summary(first)["stored_features"] == stored and summary(computed)["stored_features"] == []
    assert_equal_runs(first, computed)
    reasons = {line["reason"] for line in read_lines(first / "skipped.jsonl")}
    assert reasons == {"image does not decode", "caption is missing"}


def test_a_run_on_stored_features_of_two_sources_equals_one_that_computes_them(table):
    """One caption each and no bad sample, so that whole batches are read at once; a weight, and samples held out."""
    names = ("many", "few")
    sources = [write_csv(table.parent / name, count) for name, count in zip(names, (30, 9), strict=True)]
    for name, more in (("stored", []), ("computed", OFF)):
        flags = ["--data.train", f"{sources[0]},{sources[1]}:2", "--data.hold_out", "8", "--evaluation.retrieval", ""]
        api.train(settings_of(table, name, *IMAGE, *TEXT, *flags, *more))
    assert_equal_runs(*(table.parent / "runs" / name for name in ("stored", "computed")))


def test_with_both_towers_locked_a_second_run_reads_bad_samples_alone_whatever_is_held_out(train, read):
    train("first", *IMAGE, *TEXT)
    assert {*read} == {*range(COUNT)} - {NO_CAPTION}
    read.clear()
    second = train("second", *IMAGE, *TEXT, "--data.hold_out", "8", "--evaluation.retrieval", "")
    assert {*read} == {BAD_IMAGE} and summary(second)["samples_seen"] == 96


@pytest.mark.parametrize("locked", [[*IMAGE, *TEXT], TEXT], ids=["both towers", "the text tower"])
def test_evaluations_on_stored_features_give_the_figures_of_computed_ones(train, table, locked):
    """Of held-out samples with several captions, a bad one and one without a caption, and of the normalizer error."""
    held_out = ["--evaluation.retrieval", f"same={table}", "--data.hold_out", "6", "--evaluation.every", "48"]
    flags = [*locked, *held_out, "--evaluation.error_anchors", "20", "--train.samples", "96"]
    stored, computed = (
        read_lines(RunFolder(train(name, *flags, *more)).evaluation)
        for name, more in (("stored", []), ("computed", OFF))
    )
    assert len(stored) == 2 and any(line["same.skipped"] == 2 for line in stored)
    for ours, theirs in zip(stored, computed, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_an_evaluation_of_locked_towers_decodes_no_image_again(train, table, monkeypatch):
    flags = [*IMAGE, *TEXT, "--evaluation.retrieval", f"same={table}", "--evaluation.gallery", "0"]
    train("first", *flags)
    decoded, real = set(), Image.open

    def noted(file, *rest, **more):
        decoded.add(bytes(file.getbuffer()))
        return real(file, *rest, **more)

    monkeypatch.setattr(Image, "open", noted)
    train("second", *flags)
    assert decoded <= {b"bad"}  # to say why


def test_features_are_stored_by_weights_and_images(train, features, table):
    train("first", *IMAGE)
    train("again", *IMAGE, "--data.hold_out", "8", "--evaluation.retrieval", "")  # the same weights and files
    assert len(list(features.iterdir())) == 1
    train("other-weights", *IMAGE, "--run.seed", "1")
    assert len(list(features.iterdir())) == 2
    (table.parent / "3.png").write_bytes(image_bytes(4))
    changed, computed = train("changed", *IMAGE), train("computed", *IMAGE, *OFF)
    assert len(list(features.iterdir())) == 3
    assert_equal_runs(changed, computed)


def test_a_run_that_sees_no_sample_twice_stores_nothing(train, features):
    train("short", *IMAGE, *TEXT, "--train.samples", "40")
    assert not features.exists()


def test_a_resumed_run_may_change_whether_features_are_stored(train, table):
    whole, half = train("whole", *TEXT), train("half", *TEXT, "--checkpoint.keep", "9")
    folder = RunFolder(half)
    for late in checkpoints_in(folder)[2:]:
        late.unlink()
    api.train(read_settings(folder.settings, OFF), resume=half)
    assert_equal_runs(whole, half)


# --- What happens while they are stored, and to them


def train_killed_in_a_block(table: Path) -> None:
    """In the third of the text tower, between its rows and their checksum: the image tower has five."""
    stored_features.BLOCK = BLOCK
    with at_write("counts", lambda: os.kill(os.getpid(), signal.SIGKILL), nth=8):
        api.train(settings_of(table, "killed", *IMAGE, *TEXT))


@pytest.mark.slow
def test_what_a_kill_left_half_written_is_computed_again_and_nothing_else(train, table, read, monkeypatch):
    assert processes.run(train_killed_in_a_block, table).code == -signal.SIGKILL
    monkeypatch.setattr(stored_features, "BLOCK", BLOCK)
    after = train("after", *IMAGE, *TEXT)
    assert {*read} == {BAD_IMAGE, *range(16, COUNT)} - {NO_CAPTION}
    assert_equal_runs(after, train("computed", *IMAGE, *TEXT, *OFF))


NUMBERS = np.arange(COUNT)[:, None]
DAMAGES = {  # what becomes of the rows, and which images are read again
    "doubled": (lambda rows: np.where(NUMBERS == 17, 2 * rows, rows), range(16, 24)),
    "exchanged": (lambda rows: rows[[*range(17), 18, 17, *range(19, COUNT)]], range(16, 24)),
    "zeros": (lambda rows: np.where(NUMBERS == 17, 0 * rows, rows), range(16, 24)),
    "cut off": (lambda rows: rows[:20], range(16, COUNT)),
    "gone": (None, range(COUNT)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_rows_that_are_not_as_they_were_written_are_computed_again(train, features, read, monkeypatch, damage):
    monkeypatch.setattr(stored_features, "BLOCK", BLOCK)
    first = train("first", *IMAGE, *TEXT)
    (about,) = (path for path in features.glob("*/about.json") if '"side": "image"' in path.read_text())
    (file,) = about.parent.glob("features.*")
    rows, (change, again) = np.fromfile(file, "<f4").reshape(COUNT, -1), DAMAGES[damage]
    file.unlink()
    if change:
        change(rows).tofile(file)
    read.clear()
    assert_equal_runs(first, train("again", *IMAGE, *TEXT))
    assert {*read} == {BAD_IMAGE, *again} - {NO_CAPTION}


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


def test_features_for_which_there_is_no_room_are_refused_after_the_first_block(train, cache, monkeypatch):
    usage = shutil.disk_usage
    little = usage("/")._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: little if str(cache) in str(place) else usage(place))
    with pytest.raises(RunFailed, match=r"\([\d.]+ kB are needed and 100 bytes are free\); free some space"):
        train("full", *IMAGE)
