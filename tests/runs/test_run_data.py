"""The data of a run: near or far, held out, weighted, with several captions; and what of their addresses is secret."""

from __future__ import annotations

import json
import shutil
import stat
import time
from pathlib import Path

import pytest

from neuclip import api
from neuclip.cli.main import main
from neuclip.data.open import open_source
from neuclip.data.order import ShardOrder
from neuclip.errors import RunFailed, UserError
from neuclip.records import RunFolder
from neuclip.runs.folder import checkpoints_in
from neuclip.settings.reading import read_settings
from tests.builders.images import caption, image_bytes, write_csv, write_shards
from tests.builders.models import NORMS_FILE
from tests.builders.reading import training_data
from tests.builders.runs import BATCH, STEPS, assert_equal_runs, last_checkpoint, losses, recorded, summary

pytestmark = pytest.mark.slow


# --- Far away


def test_a_remote_that_disappears_in_mid_epoch_leaves_a_run_that_goes_on_when_it_is_back(
    train, tmp_path, server, monkeypatch
):
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between two tries
    write_shards(server.folder, 72, shards=36)  # three groups of twelve shards, each of 24 samples
    order = ShardOrder(open_source(str(server.folder)).ends, seed=0)
    lost = order.group_at(48).shards.tolist()
    server.faults = {f"{shard:05d}.tar": ["cut"] * 1000 for shard in lost}
    flags = ["--data.train", f"{server.url}/{{00000..00035}}.tar", "--run.seed", "0"]
    with pytest.raises(RunFailed, match=rf"{server.url}/000\d\d\.tar: could not be fetched .*--resume") as failure:
        train(*flags)
    run = tmp_path / "runs" / "r"
    assert "\n" not in str(failure.value) and last_checkpoint(run)["samples"] == 48 and len(losses(run)) == 6
    server.faults = {}
    train(*flags, resume="auto")
    whole = train(*flags, "--run.name", "whole")
    assert_equal_runs(run, whole.path)


@pytest.mark.parametrize("start", ["local", "remote"])
def test_the_same_shards_at_another_place_have_another_order_and_are_refused_at_resume(train, server, start):
    write_shards(server.folder, 40, shards=20)
    places = {"local": str(server.folder), "remote": f"{server.url}/{{00000..00019}}.tar"}
    run = train("--data.train", places[start])
    other = places["remote" if start == "local" else "local"]
    with pytest.raises(RunFailed) as refusal:
        api.train(read_settings(run.settings, ["--data.train", other]), resume=run.path)
    message = str(refusal.value)
    assert "all samples mixed" in message and "16 mixed at a time" in message and "\n" not in message


# --- What is read of them


@pytest.mark.parametrize(("weight", "first_epoch"), [("", 5), (":3", STEPS)])
@pytest.mark.parametrize(("name", "figure", "at_first"), [("fastclip", "gamma", 1.0), ("amorlip", "blend", 0.0)])
def test_what_counts_epochs_counts_the_samples_that_weights_make_of_them(
    train, shards, weight, first_epoch, name, figure, at_first
):
    """40 samples are five steps, three times as many more than the run has."""
    run = train("--data.train", f"{shards}{weight}", "--objective.name", name)
    assert [value == at_first for value in recorded(run.path, figure)] == [step < first_epoch for step in range(STEPS)]
    assert recorded(run.path, "epoch")[-1] == pytest.approx(STEPS * BATCH / (120 if weight else 40))


def test_a_run_says_how_many_captions_its_images_have_and_measures_under_the_names_given(
    train, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for number in range(10):
        (tmp_path / f"{number}.png").write_bytes(image_bytes(number))
    rows = [f"{number}.png,{caption(number)} {turn}" for turn in range(5) for number in range(10)]
    (tmp_path / "rows.csv").write_text("\n".join(["image,caption", *rows]))
    listed = [{"image": f"{n}.png", "caption": [f"{caption(n)} {k}" for k in range(4 + n % 3)]} for n in range(10)]
    (tmp_path / "lists.jsonl").write_text("\n".join(map(json.dumps, listed)))
    flags = ["--train.samples", "16", "--evaluation.retrieval", "mine=rows.csv", "--evaluation.zero_shot", "none"]
    run = train("--data.train", "lists.jsonl", *flags)
    start = capsys.readouterr().err
    assert "lists.jsonl: 10 samples with 49 captions (4 to 6 each)\n" in start
    assert "held out mine: 10 samples with 50 captions (5 each)\n" in start
    assert "name others with --evaluation.image_column and --evaluation.caption_column\n" in start
    assert "10 samples with 49 captions (4 to 6 each)" in run.report.read_text()
    assert summary(run.path)["evaluation"]["mine.images"] == 10


def test_a_run_never_trains_on_what_it_holds_out_and_all_commands_know_it(train, tmp_path, capsys):
    table = write_csv(tmp_path / "pairs", 40)
    flags = ["--data.train", str(table), "--data.hold_out", "10", "--evaluation.every", str(4 * BATCH)]
    run = train(*flags)
    assert "30 samples, 1 caption each" in capsys.readouterr().err
    source = training_data(table, *flags[2:4])
    trained_on = {int(source.where(id).rpartition("row ")[2]) - 1 for id in range(len(source))}
    whole = shutil.copytree(run.path, tmp_path / "whole")
    for path in checkpoints_in(run)[-2:]:
        path.unlink()
    assert_equal_runs(train(*flags, resume="auto").path, whole)
    with pytest.raises(UserError, match=r"another data\.hold_out"):
        train(*flags, "--data.hold_out", "11", resume="auto")
    capsys.readouterr()
    assert main(["eval", str(run.path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == summary(run.path)["evaluation"] and figures["pairs#held-out.images"] == 10
    assert main(["error", str(run.path), "--anchors", "30", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["anchors"] == 30  # there are no more in training
    held_out = [image for image in table.parent.glob("*.png") if int(image.stem) not in trained_on]
    assert len(held_out) == 10
    for image in held_out:
        image.write_bytes(image_bytes(7))
    assert losses(train(*flags, "--run.name", "other images").path) == losses(run.path)


# --- Addresses


def test_a_run_goes_on_with_its_data_at_another_place_and_keeps_signatures_to_itself(train, server, capsys):
    write_shards(server.folder, 40, shards=2)
    signed = f"{server.url}/{{00000..00001}}.tar?X-Amz-Signature="
    run = train("--data.train", f"{signed}first")
    shutil.rmtree(run.model)
    changed = ["--data.cache_size", "1B", "--data.remote_timeout", "5", "--data.max_bad_share", "0.5"]
    moved = read_settings(run.settings, ["--data.train", f"{signed}second", *changed])
    assert api.train(moved, resume=run.path) == run.path and run.model.exists()
    assert read_settings(run.settings).data.train == f"{signed}second"  # `neuclip error` must find it
    printed = "".join(capsys.readouterr())
    assert server.url in printed and "Signature" not in printed + run.report.read_text()


def test_no_output_and_no_file_of_a_run_shows_a_password_and_settings_are_private(
    server, tmp_path, monkeypatch, capfd
):  # fmt: skip
    write_shards(server.folder, 32)
    address = f"{server.url.replace('://', '://me:SECRET@')}/{{00000..00001}}.tar?sign=SECRET"
    run = str(tmp_path / "r")
    flags = f"""--data.train {address} --evaluation.retrieval {address} --run.folder {tmp_path} --run.name r
        --run.threads 1 --data.workers 0 --model.name {NORMS_FILE} --train.samples 16 --train.batch_size 8
        --objective clip --evaluation.error_anchors 0""".split()
    working = (
        ["train", *flags],
        ["train", "--resume", run],
        ["eval", run],
        ["export", run, "--to", "open_clip"],
        ["data", "index", address, "--json"],
    )
    failing = (
        ["eval", run],
        ["train", address],
        ["train", "--evaluation.retrieval", f"{address},,b"],
        ["eval", run, "--retrieval", f"{address},,b"],
        ["doctor", f"{address}x"],
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # addresses in the settings of a run are fetched
    assert [main(arguments) for arguments in working] == [0] * 5
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert {main(arguments) for arguments in failing} <= {1, 2}
    printed = capfd.readouterr()
    assert "SECRET" not in printed.out + printed.err and "***@127.0.0.1" in printed.err
    files = [file for file in Path(run).rglob("*") if file.is_file()]
    assert [file.name for file in files if b"SECRET" in file.read_bytes()] == ["settings.yaml"]
    assert stat.S_IMODE(RunFolder(run).settings.stat().st_mode) == 0o600
