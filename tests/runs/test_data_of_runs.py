"""Runs and the place of their data: order, epochs, workers, and a remote that goes away and comes back."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from functools import partial

import pytest

from neuclip import api
from neuclip.cli.main import main
from neuclip.data.loader import Batches
from neuclip.data.open import open_source
from neuclip.data.order import ShardOrder
from neuclip.data.tar.remote import Limits
from neuclip.errors import RunFailed
from neuclip.records import RunFolder
from neuclip.runs.folder import checkpoints_in, load_checkpoint
from neuclip.runs.lifecycle import build_run, check_resumable, open_data
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import settings_as_yaml
from tests.builders.data import pair, write_tar
from tests.builders.images import caption, image_bytes, write_shards
from tests.builders.models import NORMS_FILE
from tests.builders.runs import losses, settings_for

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def soon_given_up(monkeypatch):
    monkeypatch.setattr("neuclip.data.open.Limits", partial(Limits, attempts=2, first_wait=0))


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
    address = f"{server.url}/{{00000..00035}}.tar"
    flags = ["--data.train", address, "--run.seed", "0"]
    broken = small_settings(tmp_path, *flags, "--run.name", "broken")
    with pytest.raises(RunFailed, match=rf"{server.url}/000\d\d\.tar: could not be fetched .*--resume") as failure:
        api.train(broken)
    assert "\n" not in str(failure.value) and seen == order.ids(0, 48).tolist()
    folder = RunFolder(tmp_path / "broken")
    reached = load_checkpoint(checkpoints_in(folder)[-1])["samples"]
    assert reached == 48 and len(losses(folder.path)) == 6
    server.faults = {}
    api.train(read_settings(folder.settings, []), resume=folder.path)
    assert seen == order.ids(0, 96).tolist(), "what both runs saw, one after the other, is one unbroken order"
    whole = small_settings(tmp_path, *flags, "--run.name", "whole", "--data.workers", "2")  # which start afresh
    assert losses(folder.path) == losses(api.train(whole))


def test_what_messages_advise_to_change_may_change_at_resume(small_settings, tmp_path):
    settings = small_settings(tmp_path)
    RunFolder(tmp_path).settings.write_text(settings_as_yaml(settings))
    changed = {"cache_size": "1B", "remote_timeout": "5", "max_bad_share": "0.5", "workers": "1"}
    flags = [word for field, value in changed.items() for word in (f"--data.{field}", value)]
    check_resumable(read_settings(RunFolder(tmp_path).settings, flags), RunFolder(tmp_path))


@pytest.mark.parametrize("start", ["local", "remote"])
def test_the_same_shards_at_another_place_have_another_order_and_are_refused_at_resume(
    small_settings, tmp_path, server, start
):  # fmt: skip
    write_shards(server.folder, 40, shards=20)
    places = {"local": str(server.folder), "remote": f"{server.url}/{{00000..00019}}.tar"}
    folder = RunFolder(api.train(small_settings(tmp_path, "--data.train", places[start], "--run.name", "x")))
    other = places["remote" if start == "local" else "local"]
    stored = folder.settings.read_text()
    folder.settings.write_text(stored.replace(places[start], other))
    with pytest.raises(RunFailed) as refusal:
        api.train(read_settings(folder.settings, []), resume=folder.path)
    message = str(refusal.value)
    assert "all samples mixed" in message and "16 mixed at a time" in message and "\n" not in message


def test_a_run_goes_on_with_its_data_at_another_place_and_keeps_signatures_to_itself(
    small_settings, tmp_path, server, capsys
):
    write_shards(server.folder, 40, shards=2)
    signed = f"{server.url}/{{00000..00001}}.tar?X-Amz-Signature="
    settings = small_settings(tmp_path, "--data.train", f"{signed}first", "--run.name", "x")
    folder = RunFolder(api.train(settings))
    shutil.rmtree(folder.path / "model")
    moved = read_settings(folder.settings, ["--data.train", f"{signed}second"])
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
def test_what_counts_epochs_counts_the_samples_that_weights_make_of_them(
    small_settings, shards, tmp_path, weight, epoch
):
    for name in ("fastclip", "amorlip"):
        flags = ["--data.train", f"{shards}{weight}", "--objective.name", name]
        settings = settings_for(tmp_path, shards, *flags)
        run = build_run(settings, RunFolder(tmp_path / "x"), open_data(settings))
        assert run.epoch_samples == run.objective.epoch_samples == epoch
        assert name == "amorlip" or run.objective.dataset_size == 40


def test_gamma_is_one_until_every_weighted_sample_had_its_turns():
    from neuclip import FastCLIP

    objective = FastCLIP(40, epoch_samples=120, gamma=0.5, gamma_decay_samples=240)
    gammas = []
    for objective.samples_seen in (0, 40, 119, 120, 200, 240):
        gammas.append(objective.gamma_now())
    assert gammas == pytest.approx([1.0, 1.0, 1.0, 0.75, 0.5 + 0.25 * (1 + math.cos(math.pi * 200 / 240)), 0.5])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot lend a process fewer cores")
def test_more_workers_than_cores_are_told_in_one_line_with_a_remedy(shards, tmp_path, capfd, recwarn):
    flags = f"""--data.train {shards} --run.folder {tmp_path} --run.name x --run.threads 1 --model.name {NORMS_FILE}
        --train.batch_size 8 --train.samples 24 --objective.num_prototypes 8 --evaluation.error_anchors 0
        --data.workers 2""".split()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert main(["train", *flags]) == 0
    finally:
        os.sched_setaffinity(0, cores)
    told = [line for line in capfd.readouterr().err.splitlines() if "orkers " in line]
    assert len(told) == 1 and "data.workers is 2 and there are 1 cores" in told[0] and "--data.workers 1" in told[0]
    assert not [warning for warning in recwarn if "DataLoader" in str(warning.message)]


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
    report = RunFolder(folder).report.read_text()
    assert (
        "10 samples with 49 captions (4 to 6 each)" in report and "mine, 10 images, 50 captions, 5 per image" in report
    )
    assert json.loads(RunFolder(folder).summary.read_text())["evaluation"]["mine.images"] == 10
    assert main(["eval", str(folder)]) == 0
    assert re.search(r"\n  captions +50 +5 per image\n", capsys.readouterr().out)
