"""Whole runs with real towers: stopping them anywhere changes nothing, and what cannot go on is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO

import pytest
import torch

from neuclip import api
from neuclip.cli.main import main
from neuclip.distributed.ranks import StopRequest
from neuclip.errors import RunFailed, RunInterrupted, UserError
from neuclip.files import UNFINISHED, new_file
from neuclip.records import RunFolder, read_lines
from neuclip.runs import checkpoint, lifecycle, results
from neuclip.runs.build import resolve_held_out
from neuclip.runs.checkpoint import checkpoint_name, checkpoints_in, load_checkpoint
from neuclip.runs.folder import check_new
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import settings_as_yaml
from neuclip.training import loop
from tests.builders import processes
from tests.builders.images import write_csv, write_shards
from tests.builders.processes import main_killed_at_step, main_killed_at_write
from tests.builders.runs import BATCH, STEPS, losses

pytestmark = pytest.mark.slow


def test_fast_pixels_change_the_losses_a_little(finished, tmp_path):
    again = read_settings(finished.settings, ["--run.folder", str(tmp_path), "--data.pixels", "fast"])
    fast, exact = losses(api.train(again)), losses(finished.path)
    assert fast != exact
    assert fast == pytest.approx(exact, rel=0.02)


def test_stored_settings_repeat_the_run_to_the_bit(finished, tmp_path):
    again = read_settings(finished.settings, ["--run.folder", str(tmp_path), "--evaluation.every", "0"])
    assert losses(api.train(again)) == losses(finished.path)


def test_other_workers_give_the_same_losses(finished, tmp_path):
    flags = ["--run.folder", str(tmp_path), "--data.workers", "2", "--evaluation.error_anchors", "0"]
    assert losses(api.train(read_settings(finished.settings, flags))) == losses(finished.path)


def test_a_csv_of_the_same_pairs_gives_the_same_losses(finished, tmp_path):
    table = write_csv(tmp_path / "pairs", 40)
    flags = ["--run.folder", str(tmp_path), "--data.train", str(table), "--evaluation.error_anchors", "0"]
    assert losses(api.train(read_settings(finished.settings, flags))) == losses(finished.path)


KILLED = {  # moment: how the run is killed, the steps of the checkpoints that it leaves
    "between": (partial(main_killed_at_step, 4), [0, 3]),  # some steps after the last checkpoint
    # a new run writes three files, then its first checkpoint
    "while saving the first": (partial(main_killed_at_write, 4), []),
    "while saving": (partial(main_killed_at_write, 5), [0]),
}


@pytest.mark.parametrize("moment", KILLED)
def test_killed_and_resumed_it_gives_the_same_losses_to_the_bit(finished, small_settings, tmp_path, capsys, moment):
    settings = small_settings(tmp_path, "--run.name", "killed", "--evaluation.every", str(5 * BATCH))
    (tmp_path / "settings.yaml").write_text(settings_as_yaml(settings))
    kill, steps = KILLED[moment]
    child = kill(["train", str(tmp_path / "settings.yaml")])
    assert child.code == -signal.SIGKILL, child.errors
    folder = RunFolder(tmp_path / "killed")
    assert [load_checkpoint(path)["step"] for path in checkpoints_in(folder.checkpoints)] == steps
    assert len(list(folder.path.rglob(f".*{UNFINISHED}"))) == (moment != "between")
    assert main(["train", str(folder.settings)]) == 2
    assert f"or continue it: neuclip train --resume {folder.path}\n" in capsys.readouterr().err
    resumed = read_settings(folder.settings, ["--evaluation.every", "0"])
    api.train(resumed, resume=folder.path)
    assert losses(folder.path) == losses(finished.path)
    assert json.loads(folder.summary.read_text())["samples_seen"] == STEPS * BATCH
    assert not list(folder.path.rglob(f".*{UNFINISHED}"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_stop_it_saves_and_can_go_on(finished, small_settings, tmp_path, monkeypatch, number, code):
    settings = small_settings(tmp_path, "--run.name", "stopped", "--evaluation.every", str(4 * BATCH))
    monkeypatch.setattr(results, "evaluate_on_the_way", lambda run, sets: signal.raise_signal(number))
    before = signal.getsignal(number)
    with pytest.raises(RunInterrupted, match="--resume") as stopped:
        api.train(settings)
    monkeypatch.undo()
    assert stopped.value.exit_code == code
    folder = tmp_path / "stopped"
    # Asked during the evaluation after step 4, and no step more.
    assert load_checkpoint(checkpoints_in(RunFolder(folder).checkpoints)[-1])["step"] == 4
    assert signal.getsignal(number) == before
    api.train(read_settings(folder / "settings.yaml", ["--evaluation.every", "0"]), resume=folder)
    assert losses(folder) == losses(finished.path)


def test_a_run_never_overwrites_another(finished, small_settings, tmp_path):
    with pytest.raises(UserError, match=r"exists; give another --run\.name"):
        check_new(read_settings(finished.settings))
    unnamed = small_settings(tmp_path)
    first = check_new(unnamed)
    (first / "checkpoints").mkdir(parents=True)
    assert check_new(unnamed).name == f"{first.name}-2"
    assert first.name.endswith("-neuclip-norms")


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--objective", "clip"], "objective.name"),
        (["--model.name", "small"], "model.name"),
        (["--train.samples", "1k"], "train.samples"),
        (["--run.seed", "5"], "run.seed"),
    ],
)
def test_resuming_with_another_setting_that_matters_is_refused(finished, flags, field):
    with pytest.raises(UserError, match=field):
        api.train(read_settings(finished.settings, flags), resume=finished.path)


def test_a_checkpoint_of_another_objective_is_refused(finished, small_settings, tmp_path):
    settings = small_settings(tmp_path, "--objective", "clip", "--run.name", "other")
    folder = RunFolder(tmp_path / "other")
    folder.checkpoints.mkdir(parents=True)
    folder.settings.write_text(settings_as_yaml(settings))
    newest = checkpoints_in(finished.checkpoints)[-1]
    (folder.checkpoints / newest.name).write_bytes(newest.read_bytes())
    with pytest.raises(UserError, match="trained with objective neuclip, not clip"):
        api.train(settings, resume=folder.path)


def test_resuming_on_changed_data_is_refused(small_settings, tmp_path):
    data = write_shards(tmp_path / "data", 40)
    settings = small_settings(tmp_path, "--run.name", "first", "--data.train", str(data), "--train.samples", "8")
    api.train(settings)
    write_shards(data, 44)
    with pytest.raises(RunFailed, match=r"40 samples then, 44 now"):
        api.train(settings, resume=tmp_path / "first")


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ("--train.batch_size 1", "--train.batch_size 2"),
        ("--train.micro_batch_size 1", "--train.micro_batch_size 2"),
        ("--train.batch_size 3 --train.micro_batch_size 2", "--train.micro_batch_size 3"),  # cut into 2 and 1
    ],
)
def test_images_one_at_a_time_are_refused_where_batch_norm_wants_several(small_settings, tmp_path, flags, advice):
    with pytest.raises(UserError, match=f"give {advice} or more"):
        api.train(small_settings(tmp_path, *flags.split()))
    assert not list(tmp_path.iterdir())


def test_a_batch_larger_than_the_data_is_refused(small_settings, tmp_path):
    with pytest.raises(UserError, match=r"larger than the data set \(40 samples"):
        api.train(small_settings(tmp_path, "--train.batch_size", "64"))
    assert not any(tmp_path.iterdir())


def test_not_a_number_stops_with_step_and_ids_and_the_last_checkpoint_stands(small_settings, tmp_path, monkeypatch):
    take_step = loop.take_step

    def poisoned(run, *rest):
        if run.step == 4:
            with torch.no_grad():
                next(p for p in run.built.towers.parameters() if p.ndim == 4).fill_(torch.nan)
        return take_step(run, *rest)

    run, stop = lifecycle.start_run(resolve_held_out(small_settings(tmp_path, "--run.name", "r"))), StopRequest()
    monkeypatch.setattr(loop, "take_step", poisoned)
    with pytest.raises(RunFailed, match=r"not a number at step 4 .*sample ids \d+"):
        loop.train(run, stop, evaluate=lambda run: None, save=lambda run: lifecycle.save(run, stop))
    state = load_checkpoint(checkpoints_in(run.folder.checkpoints)[-1])
    assert state["step"] == 3 and all(torch.isfinite(x).all() for x in state["model"].values() if x.is_floating_point())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_disk_that_fills_up_stops_the_run_and_it_can_go_on(finished, small_settings, tmp_path, monkeypatch):
    settings = small_settings(tmp_path, "--run.name", "full")
    run, stop = lifecycle.start_run(resolve_held_out(settings)), StopRequest()

    def full(place: Path) -> AbstractContextManager[IO[bytes]]:
        if place.name == checkpoint_name(6 * BATCH):
            raise OSError(errno.ENOSPC, "No space left on device")
        return new_file(place)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "new_file", full)
        with pytest.raises(RunFailed, match="the disk is full"):
            loop.train(run, stop, evaluate=lambda run: None, save=lambda run: lifecycle.save(run, stop))
    assert [path.name for path in checkpoints_in(run.folder.checkpoints)][-1] == checkpoint_name(3 * BATCH)
    api.train(settings, resume=run.folder.path)
    assert losses(run.folder.path) == losses(finished.path)


def test_a_child_of_the_command_line_is_told_apart_from_a_failure(small_settings, tmp_path):
    """SIGTERM through the real command: exit 143, saved, one line that says how to go on."""
    settings = small_settings(tmp_path, "--run.name", "cli", "--evaluation.every", str(4 * BATCH))
    (tmp_path / "settings.yaml").write_text(settings_as_yaml(settings))
    child = processes.run(main_asked_to_stop, ["train", str(tmp_path / "settings.yaml")])
    assert child.code == 143, child.errors
    assert f"neuclip train --resume {tmp_path / 'cli'}" in child.errors.splitlines()[-1]


def main_asked_to_stop(arguments: list[str]) -> int:
    results.evaluate_on_the_way = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    return main(arguments)


def test_a_resumed_run_records_the_share_of_truncated_captions_of_an_uninterrupted_one(small_settings, tmp_path):
    table = write_csv(tmp_path / "pairs", 40)
    header, *rows = table.read_text().splitlines()
    rows[::3] = [row + " and so on" * 50 for row in rows[::3]]
    table.write_text("\n".join([header, *rows]))
    flags = f"--run.name long --data.train {table} --train.samples {5 * BATCH} --checkpoint.keep 9"
    folder = RunFolder(api.train(small_settings(tmp_path, *flags.split())))
    uninterrupted = [record["truncated_captions"] for record in read_lines(folder.records)]
    assert len(set(uninterrupted)) > 2 and sum(uninterrupted) / 5 == pytest.approx(14 / 40)  # one epoch
    assert json.loads(folder.summary.read_text())["truncated_captions"] == pytest.approx(14 / 40)
    *_, checkpoint, last = checkpoints_in(folder.checkpoints)
    assert checkpoint.name == checkpoint_name(3 * BATCH)
    last.unlink()
    api.train(read_settings(folder.settings, []), resume=folder.path)
    assert [record["truncated_captions"] for record in read_lines(folder.records)] == uninterrupted


BROKEN = b'{"samples": 8, "lo\n\xff\xfe\x00\n[1, 2]\n{"loss": 3}\n'


def test_a_run_with_damaged_files_goes_on_from_the_last_good_checkpoint(finished, tmp_path, capsys):
    folder = RunFolder(shutil.copytree(finished.path, tmp_path / "run"))
    newest = checkpoints_in(folder.checkpoints)[-1]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 4
    newest.write_bytes(content)
    for path in (folder.records, folder.evaluation, folder.skipped):
        path.write_bytes(BROKEN + path.read_bytes())
    for stale in (folder.checkpoints / f".samples-7.pt.ab{UNFINISHED}", folder.path / f".report.html.ab{UNFINISHED}"):
        stale.write_bytes(b"half")
    assert main(["train", "--resume", str(folder.path)]) == 0
    told = capsys.readouterr().err
    assert f"{newest} is damaged (the checksum of" in told and f"from {9 * BATCH} to {STEPS * BATCH} samples" in told
    assert all(f"{path}: removed 4 lines that could not be read" in told for path in (folder.records, folder.skipped))
    assert losses(folder.path) == losses(finished.path)
    assert read_lines(folder.evaluation) == read_lines(finished.evaluation) and read_lines(folder.skipped) == []
    assert not list(folder.path.rglob(f".*{UNFINISHED}"))
    assert newest.with_suffix(".damaged").exists() and load_checkpoint(newest)["step"] == STEPS


def test_resuming_a_finished_run_repeats_no_line(finished, tmp_path):
    folder = RunFolder(shutil.copytree(finished.path, tmp_path / "run"))
    api.train(read_settings(folder.settings), resume=folder.path)
    for path, before in ((folder.records, finished.records), (folder.evaluation, finished.evaluation)):
        assert read_lines(path) == read_lines(before)


def test_only_a_message_about_the_data_says_that_they_may_have_moved(finished, tmp_path):
    folder = RunFolder(shutil.copytree(finished.path, tmp_path / "run"))
    moved = "; if the data were moved, add --data.train and where they are now"
    with pytest.raises(UserError) as refusal:
        api.train(read_settings(folder.settings, ["--train.micro_batch_size", "1"]), resume=folder.path)
    assert str(refusal.value).endswith("give --train.micro_batch_size 2 or more")
    with pytest.raises(UserError) as refusal:
        api.train(read_settings(folder.settings, ["--data.train", str(tmp_path / "gone")]), resume=folder.path)
    assert str(refusal.value).endswith(moved)


def test_a_disk_without_room_for_all_checkpoints_is_found_before_training(finished, small_settings, tmp_path):
    full = r"the disk is too full: 1,000,001 checkpoints and the model need [\d,.]+ \w+, and \S+ has .*; free"
    many = ["--checkpoint.keep", "1000000"]
    with pytest.raises(RunFailed, match=full):
        api.train(small_settings(tmp_path / "runs", *many))
    assert not (tmp_path / "runs").exists()
    folder = shutil.copytree(finished.path, tmp_path / "run")
    with pytest.raises(RunFailed, match=full):
        api.train(read_settings(folder / "settings.yaml", many), resume=folder)


def test_room_is_asked_for_checkpoints_as_large_as_they_become(finished, small_settings, tmp_path):
    run = lifecycle.start_run(resolve_held_out(small_settings(tmp_path)))
    lifecycle.save(run, StopRequest())
    first, full = (checkpoints_in(folder.checkpoints)[-1].stat().st_size for folder in (run.folder, finished))
    assert full > 2 * first  # which has no moments of AdamW
    assert lifecycle.needed_bytes(run) == pytest.approx(3 * full + first, rel=0.02)
