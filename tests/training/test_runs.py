"""Whole runs with real towers: what they leave behind, and that stopping them anywhere changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from neuclip import api, load
from neuclip.errors import RunFailed, RunInterrupted, UserError
from neuclip.models import open_clip_module
from neuclip.records import RunFolder, read_lines
from neuclip.runs.checkpoint import checkpoint_name, checkpoints_in, load_checkpoint
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import settings_as_yaml
from tests.images import write_csv, write_shards
from tests.training.conftest import BATCH, STEPS

pytestmark = pytest.mark.slow


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_lines(RunFolder(folder).records)]


@pytest.fixture(scope="module")
def finished(small_settings, shards, tmp_path_factory) -> RunFolder:
    flags = ["--run.name", "whole", "--evaluation.retrieval", str(shards), "--evaluation.every", str(4 * BATCH)]
    folder = tmp_path_factory.mktemp("runs")
    return RunFolder(api.train(small_settings(folder, *flags, "--evaluation.error_anchors", "20")))


def test_a_run_leaves_every_promised_file(finished):
    promised = "settings.yaml environment.json records.jsonl evaluation.jsonl summary.json gallery.json report.html"
    assert set(promised.split()) <= {path.name for path in finished.path.iterdir()}
    assert {path.name for path in finished.model.iterdir()} == {"open_clip_config.json", "open_clip_model.safetensors"}
    assert not list(finished.path.rglob("*.partial"))


def test_records_have_the_promised_keys_and_are_strict_json(finished):
    records = [json.loads(line, parse_constant=pytest.fail) for line in finished.records.read_text().splitlines()]
    keys = """samples step epoch loss temperature learning_rate accuracy calibration samples_per_second data_share
        towers_share normalizer_share"""
    assert all(set(keys.split()) <= set(record) for record in records)
    assert [record["samples"] for record in records] == [BATCH * step for step in range(1, STEPS + 1)]
    shares = [record["data_share"] + record["towers_share"] + record["normalizer_share"] for record in records]
    assert shares == pytest.approx([1.0] * STEPS)


def test_the_summary_has_the_final_figures(finished):
    summary = json.loads(finished.summary.read_text())
    assert summary["samples_seen"] == STEPS * BATCH and summary["loss"] == losses(finished.path)[-1]
    assert {"temperature", "seconds", "samples_per_second", "peak_memory_bytes", "evaluation"} <= set(summary)
    last = read_lines(finished.evaluation)[-1]
    assert summary["evaluation"] == {key: value for key, value in last.items() if key not in ("samples", "step")}
    assert [line["samples"] for line in read_lines(finished.evaluation)] == [4 * BATCH, 8 * BATCH, STEPS * BATCH]
    assert {"method", "minibatch"} == set(summary["normalizer_error"]["estimators"])


def test_the_exported_model_is_the_trained_one(finished):
    model, _, transform = open_clip_module().create_model_and_transforms(f"local-dir:{finished.model}")
    trained, own_transform, tokenize = load(str(finished.path))
    noise = Image.effect_noise((40, 50), 90)
    with torch.no_grad():
        tokens = tokenize(["a red circle"])
        assert torch.allclose(model.eval().encode_text(tokens), trained.encode_text(tokens), atol=1e-6)
    assert torch.equal(transform(noise), own_transform(noise))


def test_a_model_without_weights_is_not_evaluated(finished):
    with pytest.raises(UserError, match="without weights"):
        api.evaluate("tiny", retrieval=(), zero_shot=())


def test_the_model_folder_scores_as_the_run_it_came_from(finished, shards):
    asked = {"retrieval": (str(shards),), "zero_shot": ()}
    want = json.loads(finished.summary.read_text())["evaluation"]
    assert api.evaluate(str(finished.path), **asked) == want
    assert api.evaluate(f"local-dir:{finished.model}", **asked, batch_size=256) == pytest.approx(want)


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


DIES = """
import os, signal, sys
from pathlib import Path
from neuclip import api
from neuclip.settings.reading import read_settings
from neuclip.training import checkpoint
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "between":      # in the middle of a run, some steps after the last checkpoint
    api.evaluate_on_the_way = die
else:                             # while the checkpoint is being written
    writes = iter([os.fsync, os.fsync, os.fsync, die, die, die, die])
    checkpoint.os.fsync, keep = (lambda file: next(writes)(file)), os.fsync
api.train(read_settings(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("moment", ["between", "while saving"])
def test_killed_and_resumed_it_gives_the_same_losses_to_the_bit(finished, small_settings, tmp_path, moment):
    settings = small_settings(tmp_path, "--run.name", "killed", "--evaluation.every", str(5 * BATCH))
    (tmp_path / "settings.yaml").write_text(settings_as_yaml(settings))
    child = subprocess.run([sys.executable, "-c", DIES, str(tmp_path / "settings.yaml"), moment], capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    folder = RunFolder(tmp_path / "killed")
    reached = checkpoints_in(folder.checkpoints)[-1]
    assert 0 <= load_checkpoint(reached)["step"] < STEPS
    resumed = read_settings(folder.settings, ["--evaluation.every", "0"])
    api.train(resumed, resume=folder.path)
    assert losses(folder.path) == losses(finished.path)
    assert json.loads(folder.summary.read_text())["samples_seen"] == STEPS * BATCH


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_stop_it_saves_and_can_go_on(finished, small_settings, tmp_path, monkeypatch, number, code):
    settings = small_settings(tmp_path, "--run.name", "stopped", "--evaluation.every", str(4 * BATCH))
    monkeypatch.setattr(api, "evaluate_on_the_way", lambda run, sets: signal.raise_signal(number))
    with pytest.raises(RunInterrupted, match="--resume") as stopped:
        api.train(settings)
    monkeypatch.undo()
    assert stopped.value.exit_code == code
    folder = tmp_path / "stopped"
    # Asked during the evaluation after step 4, and no step more.
    assert load_checkpoint(checkpoints_in(RunFolder(folder).checkpoints)[-1])["step"] == 4
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)
    api.train(read_settings(folder / "settings.yaml", ["--evaluation.every", "0"]), resume=folder)
    assert losses(folder) == losses(finished.path)


def test_a_run_never_overwrites_another(finished, small_settings, tmp_path):
    with pytest.raises(UserError, match=r"exists; give another --run\.name"):
        api.new_folder(read_settings(finished.settings))
    unnamed = small_settings(tmp_path)
    first = api.new_folder(unnamed)
    first.mkdir(parents=True)
    assert api.new_folder(unnamed).name == f"{first.name}-2"
    assert first.name.endswith("-neuclip-tiny")


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


def test_undecodable_images_are_replaced_counted_and_listed(small_settings, tmp_path):
    data = write_shards(tmp_path / "data", 120, spoilt=[7, 50])
    settings = small_settings(tmp_path, "--data.train", str(data), "--train.samples", "240", "--run.name", "r")
    folder = RunFolder(api.train(settings))
    assert sorted(line["id"] for line in read_lines(folder.skipped)) == [7, 50]
    assert sum(json.loads(folder.summary.read_text())["skipped"].values()) == 2


def test_too_many_bad_images_stop_the_run_with_the_list(small_settings, tmp_path):
    data = write_shards(tmp_path / "data", 120, spoilt=range(0, 120, 3))
    settings = small_settings(tmp_path, "--data.train", str(data), "--train.samples", "240", "--run.name", "r")
    with pytest.raises(RunFailed, match=r"skipped\.jsonl"):
        api.train(settings)
    assert read_lines(RunFolder(tmp_path / "r").skipped)


def test_not_a_number_stops_with_step_and_ids_and_the_last_checkpoint_stands(small_settings, tmp_path, monkeypatch):
    from neuclip.training import accumulation, loop

    real, calls = accumulation.autocast, iter(range(100))

    def poisoned(device, precision):
        if next(calls) == 4:
            with torch.no_grad():
                next(p for p in run.built.towers.parameters() if p.ndim == 4).fill_(torch.nan)
        return real(device, precision)

    settings = small_settings(tmp_path, "--run.name", "r")
    run = api.start_run(api.with_held_out_sets(settings))
    monkeypatch.setattr(accumulation, "autocast", poisoned)
    with pytest.raises(RunFailed, match=r"not a number at step 4 .*sample ids \d+"):
        loop.train(run, lambda run: None)
    state = load_checkpoint(checkpoints_in(run.folder.checkpoints)[-1])
    assert state["step"] == 3 and all(torch.isfinite(x).all() for x in state["model"].values() if x.is_floating_point())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_disk_that_fills_up_stops_the_run_and_it_can_go_on(finished, small_settings, tmp_path):
    settings = small_settings(tmp_path, "--run.name", "full")
    run = api.start_run(api.with_held_out_sets(settings))
    blocked = (run.folder.checkpoints / checkpoint_name(6 * BATCH)).with_suffix(".partial")
    blocked.symlink_to("/dev/full")
    from neuclip.training import loop

    with pytest.raises(RunFailed, match="No space left"):
        loop.train(run, lambda run: None)
    assert [path.name for path in checkpoints_in(run.folder.checkpoints)][-1] == checkpoint_name(3 * BATCH)
    api.train(settings, resume=run.folder.path)
    assert losses(run.folder.path) == losses(finished.path)


def test_clip_trains_in_the_same_loop_and_has_no_calibration(small_settings, tmp_path):
    folder = RunFolder(api.train(small_settings(tmp_path, "--objective", "clip", "--log.tensorboard", "true")))
    records = read_lines(folder.records)
    assert all(record["calibration"] is None for record in records)
    assert any((folder.path / "tensorboard").iterdir())


def test_a_child_of_the_command_line_is_told_apart_from_a_failure(small_settings, tmp_path):
    """SIGTERM through the real command: exit 143, saved, one line that says how to go on."""
    settings = small_settings(tmp_path, "--run.name", "cli", "--evaluation.every", str(4 * BATCH))
    (tmp_path / "settings.yaml").write_text(settings_as_yaml(settings))
    script = (
        "import os, signal, sys; from neuclip import api; from neuclip.cli.main import main\n"
        "api.evaluate_on_the_way = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(main(['train', sys.argv[1]]))"
    )
    child = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "settings.yaml")], capture_output=True, text=True, env=os.environ
    )
    assert child.returncode == 143, child.stderr
    assert f"neuclip train --resume {tmp_path / 'cli'}" in child.stderr.splitlines()[-1]
