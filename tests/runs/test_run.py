"""Whole runs with real towers: what may change leaves the losses alone, what cannot work is refused before training,
and where the data lie does not matter."""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import replace
from functools import partial

import pytest

from neuclip import api
from neuclip.cli.main import main
from neuclip.data.loader import Batches
from neuclip.data.open import open_source
from neuclip.data.order import ShardOrder
from neuclip.data.tar.remote import Limits
from neuclip.errors import RunFailed, UserError
from neuclip.records import RunFolder, read_lines
from neuclip.runs import lifecycle
from neuclip.runs.build import build_run, open_training_source, resolve
from neuclip.runs.folder import checkpoints_in, load_checkpoint
from neuclip.settings.reading import read_settings
from tests.builders import data as builders
from tests.builders.data import pair, write_tar
from tests.builders.images import caption, image_bytes, write_csv, write_shards
from tests.builders.models import NORMS_FILE
from tests.builders.runs import BATCH, losses

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def soon_given_up(monkeypatch):
    monkeypatch.setattr("neuclip.data.open.Limits", partial(Limits, attempts=2, first_wait=0))


@pytest.mark.parametrize("change", ["nothing", "workers", "csv"])
def test_stored_settings_repeat_the_run_to_the_bit_with_other_workers_and_from_other_files(finished, tmp_path, change):
    flags = {
        "nothing": [],
        "workers": ["--data.workers", "2"],
        "csv": ["--data.train", str(write_csv(tmp_path / "pairs", 40))],
    }[change]
    off = ["--evaluation.every", "0", "--evaluation.error_anchors", "0", "--run.folder", str(tmp_path)]
    assert losses(api.train(read_settings(finished.settings, [*off, *flags]))) == losses(finished.path)


def test_fast_pixels_change_the_losses_a_little(finished, tmp_path):
    again = read_settings(finished.settings, ["--run.folder", str(tmp_path), "--data.pixels", "fast"])
    fast, exact = losses(api.train(again)), losses(finished.path)
    assert fast != exact and fast == pytest.approx(exact, rel=0.02)


def test_a_run_is_built_and_takes_a_step_without_a_folder(small_settings, tmp_path, finished):
    """As `neuclip doctor` does: the loss is that of the run's first record."""
    from neuclip.training.loop import parallel, take_step

    settings = small_settings(tmp_path / "runs")
    run = build_run(resolve(settings), open_training_source(settings))
    loss, _ = take_step(run, parallel(run), next(run.remaining_batches()))
    assert loss.item() == losses(finished.path)[0]
    assert "12 steps of 8, to 96 samples (2.4 epochs)" in lifecycle.describe(run)
    lifecycle.check_disk(run)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ("--train.batch_size 1", UserError, "give --train.batch_size 2 or more"),
        ("--train.micro_batch_size 1", UserError, "give --train.micro_batch_size 2 or more"),
        # cut into 2 and 1
        ("--train.batch_size 3 --train.micro_batch_size 2", UserError, "give --train.micro_batch_size 3 or more"),
        ("--train.batch_size 64", UserError, r"larger than the data set \(40 samples"),
        ("--data.train=", UserError, "data.train is not set; give --data.train icons-30k"),
        ("--model.name gone.json", UserError, "gone.json"),
        ("--run.folder /proc/runs", UserError, "/proc/runs: cannot be written"),
        ("--evaluation.retrieval gone.csv", UserError, "gone.csv"),
        (
            "--checkpoint.keep 1000000",
            RunFailed,
            r"the disk is too full: 1,000,001 checkpoints and the model need [\d,.]+ \w+, and \S+ has .*; free",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_training_and_leaves_no_folder(
    small_settings, tmp_path, flags, error, message
):
    with pytest.raises(error, match=message):
        api.train(small_settings(tmp_path / "runs", *flags.split()))
    assert not any(tmp_path.iterdir())


def test_room_is_asked_for_checkpoints_as_large_as_they_become(finished, small_settings, tmp_path):
    settings = resolve(small_settings(tmp_path))
    run = build_run(settings, open_training_source(settings))
    full, model = checkpoints_in(finished)[-1].stat().st_size, run.built.towers.model.state_dict()
    assert full > 2 * sum(x.nbytes for x in model.values())  # with the moments of AdamW
    assert lifecycle.needed_bytes(run) == pytest.approx(3 * full + sum(x.nbytes for x in model.values()), rel=0.02)
    folder = shutil.copytree(finished.path, tmp_path / "run")
    with pytest.raises(RunFailed, match="the disk is too full"):
        api.train(read_settings(folder / "settings.yaml", ["--checkpoint.keep", "1000000"]), resume=folder)


# --- What a run is told


def test_advice_is_printed_once_before_the_first_step(small_settings, tmp_path, capfd):
    api.train(small_settings(tmp_path, "--train.samples", "16"))
    told = capfd.readouterr().err
    assert told.count("there is no held-out data: the loss alone does not show quality; give --data.hold_out 4") == 1


# --- Where the data lie


@pytest.fixture
def seen(monkeypatch) -> list[int]:
    """The ids that a run trains on."""
    ids: list[int] = []
    steps = Batches.steps

    def noted(self, *arguments):
        for batch in steps(self, *arguments):
            ids.extend(batch.ids.tolist())
            yield batch

    monkeypatch.setattr(Batches, "steps", noted)
    return ids


def test_a_remote_that_disappears_in_mid_epoch_leaves_a_run_that_goes_on_when_it_is_back(
    small_settings, tmp_path, server, seen
):  # fmt: skip
    write_shards(server.folder, 72, shards=36)  # three groups of twelve shards, each of 24 samples
    ends = open_source(str(server.folder)).ends  # and their indexes beside them
    order = ShardOrder(ends, seed=0)
    lost = order.group_at(48).shards.tolist()
    server.faults = {f"{shard:05d}.tar": ["cut"] * 1000 for shard in lost}
    flags = ["--data.train", f"{server.url}/{{00000..00035}}.tar", "--run.seed", "0"]
    broken = small_settings(tmp_path, *flags, "--run.name", "broken")
    with pytest.raises(RunFailed, match=rf"{server.url}/000\d\d\.tar: could not be fetched .*--resume") as failure:
        api.train(broken)
    assert "\n" not in str(failure.value) and seen == order.ids(0, 48).tolist()
    folder = RunFolder(tmp_path / "broken")
    assert load_checkpoint(checkpoints_in(folder)[-1])["samples"] == 48 and len(losses(folder.path)) == 6
    server.faults = {}
    api.train(broken, resume="auto")
    assert seen == order.ids(0, 96).tolist(), "what both runs saw, one after the other, is one unbroken order"
    whole = small_settings(tmp_path, *flags, "--run.name", "whole", "--data.workers", "2")  # which start afresh
    assert losses(folder.path) == losses(api.train(whole))


@pytest.mark.parametrize("start", ["local", "remote"])
def test_the_same_shards_at_another_place_have_another_order_and_are_refused_at_resume(
    small_settings, tmp_path, server, start
):  # fmt: skip
    write_shards(server.folder, 40, shards=20)
    places = {"local": str(server.folder), "remote": f"{server.url}/{{00000..00019}}.tar"}
    folder = RunFolder(api.train(small_settings(tmp_path, "--data.train", places[start], "--run.name", "x")))
    other = places["remote" if start == "local" else "local"]
    with pytest.raises(RunFailed) as refusal:
        api.train(read_settings(folder.settings, ["--data.train", other]), resume=folder.path)
    message = str(refusal.value)
    assert "all samples mixed" in message and "16 mixed at a time" in message and "\n" not in message


def test_a_run_goes_on_with_its_data_at_another_place_and_keeps_signatures_to_itself(
    small_settings, tmp_path, server, capsys
):
    write_shards(server.folder, 40, shards=2)
    signed = f"{server.url}/{{00000..00001}}.tar?X-Amz-Signature="
    folder = RunFolder(api.train(small_settings(tmp_path, "--data.train", f"{signed}first", "--run.name", "x")))
    shutil.rmtree(folder.path / "model")
    changed = ["--data.cache_size", "1B", "--data.remote_timeout", "5", "--data.max_bad_share", "0.5"]
    moved = read_settings(folder.settings, ["--data.train", f"{signed}second", *changed])
    assert api.train(moved, resume=folder.path) == folder.path and (folder.path / "model").exists()
    assert read_settings(folder.settings, []).data.train == f"{signed}second"  # `neuclip error` must find it
    printed = "".join(capsys.readouterr())
    assert server.url in printed and "Signature" not in printed + folder.report.read_text()


def test_no_run_is_started_on_data_of_which_too_much_is_lost(small_settings, tmp_path):
    alone = [(f"{number}.txt", b"alone") for number in range(100, 160)]
    write_tar(tmp_path / "0.tar", [member for number in range(60) for member in pair(number)] + alone)
    with pytest.raises(RunFailed, match=r"60 of 120 pairs \(at least\) could not be indexed \(50\.0%"):
        api.train(small_settings(tmp_path / "runs", "--data.train", str(tmp_path / "0.tar")))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("weight", "epoch"), [("", 40), (":3", 120)])
@pytest.mark.parametrize("name", ["fastclip", "amorlip"])
def test_what_counts_epochs_counts_the_samples_that_weights_make_of_them(
    small_settings, shards, tmp_path, weight, epoch, name
):
    settings = small_settings(tmp_path, "--data.train", f"{shards}{weight}", "--objective.name", name)
    run = build_run(resolve(settings), open_training_source(settings))
    assert run.epoch_samples == run.objective.epoch_samples == epoch
    assert name == "amorlip" or run.objective.dataset_size == 40


def test_a_run_says_how_many_captions_its_images_have_and_measures_under_the_names_given(
    small_settings, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for number in range(10):
        (tmp_path / f"{number}.png").write_bytes(image_bytes(number))
    rows = [f"{number}.png,{caption(number)} {turn}" for turn in range(5) for number in range(10)]
    (tmp_path / "rows.csv").write_text("\n".join(["image,caption", *rows]))
    listed = [{"image": f"{n}.png", "caption": [f"{caption(n)} {k}" for k in range(4 + n % 3)]} for n in range(10)]
    (tmp_path / "lists.jsonl").write_text("\n".join(map(json.dumps, listed)))
    flags = ["--train.samples", "16", "--evaluation.retrieval", "mine=rows.csv", "--evaluation.zero_shot", "none"]
    folder = api.train(small_settings(tmp_path / "runs", "--data.train", "lists.jsonl", *flags))
    start = capsys.readouterr().err
    assert "lists.jsonl: 10 samples with 49 captions (4 to 6 each)\n" in start
    assert "held out mine: 10 samples with 50 captions (5 each)\n" in start
    assert "name others with --evaluation.image_column and --evaluation.caption_column\n" in start
    assert "10 samples with 49 captions (4 to 6 each)" in RunFolder(folder).report.read_text()
    assert json.loads(RunFolder(folder).summary.read_text())["evaluation"]["mine.images"] == 10


# --- Held out, and secret


def test_a_run_never_trains_on_what_it_holds_out_and_all_commands_know_it(small_settings, tmp_path, seen, capsys):
    table = str(write_csv(tmp_path / "pairs", 40))
    flags = ["--data.train", table, "--data.hold_out", "10", "--run.name", "r", "--evaluation.every", str(4 * BATCH)]
    settings = small_settings(tmp_path, *flags)
    run = RunFolder(api.train(settings))
    assert "30 samples, 1 caption each" in capsys.readouterr().err
    source, whole = open_training_source(settings), open_source(table)
    trained_on = {source.where(id) for id in seen}
    assert len(trained_on) == 30 and len({whole.where(id) for id in range(40)} - trained_on) == 10
    before, evaluated = losses(run.path), read_lines(run.evaluation)
    for path in checkpoints_in(run)[-2:]:
        path.unlink()
    api.train(settings, resume="auto")
    assert losses(run.path) == before and read_lines(run.evaluation) == evaluated
    with pytest.raises(UserError, match=r"another data\.hold_out"):
        api.train(replace(settings, data=replace(settings.data, hold_out=11)), resume=run.path)
    capsys.readouterr()
    assert main(["eval", str(run.path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == json.loads(run.summary.read_text())["evaluation"] and figures["pairs#held-out.images"] == 10
    assert main(["error", str(run.path), "--anchors", "30", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["anchors"] == 30  # there are no more in training


def test_no_output_and_no_file_of_a_run_shows_a_password_and_settings_are_private(
    server, tmp_path, monkeypatch, capfd
):  # fmt: skip
    builders.write_shards(server.folder, [16, 16])
    address = f"{server.url.replace('://', '://me:SECRET@')}/{{00000..00001}}.tar?sign=SECRET"
    run, batch = str(tmp_path / "r"), ["--train.batch_size", "8"]
    flags = f"""--data.train {address} --evaluation.retrieval {address} --run.folder {tmp_path} --run.name r
        --run.threads 1 --data.workers 0 --model.name {NORMS_FILE} --train.samples 16 --objective clip
        --evaluation.error_anchors 0""".split()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # addresses in the settings of a run are fetched
    for arguments in (
        ["train", *flags, *batch],
        ["train", "--resume", run],
        ["eval", run],
        ["export", run, "--to", "open_clip"],
        ["data", "index", address, "--json"],
    ):
        assert main(arguments) == 0, arguments
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for arguments in (
        ["eval", run],
        ["train", address],
        ["train", "--evaluation.retrieval", f"{address},,b"],
        ["eval", run, "--retrieval", f"{address},,b"],
        ["doctor", f"{address}x"],
    ):
        assert main(arguments) in (1, 2), arguments
    printed = capfd.readouterr()
    assert "SECRET" not in printed.out + printed.err and "***@127.0.0.1" in printed.err
    files = [file for file in (tmp_path / "r").rglob("*") if file.is_file()]
    assert [file.name for file in files if b"SECRET" in file.read_bytes()] == ["settings.yaml"]
    assert stat.S_IMODE((tmp_path / "r" / "settings.yaml").stat().st_mode) == 0o600


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot lend a process fewer cores")
def test_more_workers_than_cores_give_one_line_of_ours_and_none_of_torch(small_settings, tmp_path, capfd, recwarn):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        api.train(small_settings(tmp_path, "--data.workers", "2", "--train.samples", "24"))
    finally:
        os.sched_setaffinity(0, cores)
    told = [line for line in capfd.readouterr().err.splitlines() if "orkers " in line]
    assert len(told) == 1 and told[0].startswith("2 workers on 1 core: ") and "--data.workers 1" in told[0]
    assert not [warning for warning in recwarn if "DataLoader" in str(warning.message)]
