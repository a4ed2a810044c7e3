"""One run on two ranks, in real processes: it does what one rank does, one writes, both stop and resume together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from neuclip import api
from neuclip.records import RunFolder, read_lines
from neuclip.runs.checkpoint import checkpoints_in, load_checkpoint
from neuclip.settings.writing import settings_as_yaml
from tests.evaluation.colour_shards import write_samples
from tests.images import COLOURS, caption, image_bytes, write_shards
from tests.processes.trainer import BATCH, STEPS, held_out, settings_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = {
    "embed_dim": 16,
    "vision_cfg": {"layers": 1, "width": 32, "head_width": 16, "patch_size": 16, "image_size": 32},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


NORMS = SMALL | {"vision_cfg": {"layers": [1, 1, 1, 1], "width": 8, "patch_size": None, "image_size": 32}}


def write_held_out(folder: Path) -> None:
    """`several`: 40 images, one of them bad, with one to three captions, some equal. `classes`: the same by colour."""
    pairs, classes = [], []
    for number in range(40):
        image = b"bad" if number == 11 else image_bytes(number)
        captions = [caption(number), f"{caption(number)} {number}", caption(number + 8)][: 1 + number % 3]
        pairs.append({"png": image, "json": json.dumps({"caption": captions}).encode()})
        classes.append({"png": image, "cls": str(number % len(COLOURS)).encode()})
    write_samples(folder / "several" / "0.tar", pairs)
    write_samples(folder / "classes" / "test" / "0.tar", classes)
    (folder / "classes" / "test" / "nshards.txt").write_text("1\n")
    (folder / "classes" / "classnames.txt").write_text("\n".join(COLOURS))
    (folder / "classes" / "zeroshot_classification_templates.txt").write_text("a {c} shape\n{c}\n")


def on_two_ranks(what: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    command = [sys.executable, *program, "-m", "tests.processes.trainer", what, str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["NEUCLIP_CACHE"] = str(folder / "cache")
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """All runs: one rank, two that were killed, and everything in tests/processes/trainer.py."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "small.json").write_text(json.dumps(SMALL))
    (folder / "norms.json").write_text(json.dumps(NORMS))
    write_held_out(folder)
    write_shards(folder / "shards", 40)
    write_shards(folder / "spoilt", 60, spoilt=[7, 30, 51])
    write_shards(folder / "bad", 120, spoilt=range(0, 120, 3))
    (folder / "killed.yaml").write_text(settings_as_yaml(settings_for(folder, "killed")))
    dead = on_two_ranks("dies", folder)
    (folder / "killed.log").write_text(dead.stderr)
    shutil.copytree(folder / "killed", folder / "killed-too")
    alive = on_two_ranks("scenarios", folder)
    assert alive.returncode == 0, alive.stderr
    (folder / "alive.log").write_text(alive.stdout + alive.stderr)
    api.train(settings_for(folder, "one", *held_out(folder), "--evaluation.error_anchors", "20"))
    return folder


@pytest.fixture(scope="module")
def endings(folder) -> list[dict[str, str]]:
    return [json.loads((folder / f"ended-{rank}.json").read_text()) for rank in range(2)]


def measured(run: Path, key: str = "loss") -> list[float]:
    return [record[key] for record in read_lines(RunFolder(run).records)]


def last_checkpoint(run: Path) -> dict:
    return load_checkpoint(checkpoints_in(RunFolder(run).checkpoints)[-1])


def test_two_ranks_give_the_losses_and_the_weights_of_one(folder):
    assert len(measured(folder / "two")) == STEPS
    for key in ("loss", "gradient_norm", "temperature", "accuracy", "mean_log_normalizer_image"):
        assert measured(folder / "two", key) == pytest.approx(measured(folder / "one", key), rel=1e-4)
    one, two = (last_checkpoint(folder / name) for name in ("one", "two"))
    for part in ("model", "objective"):
        assert one[part].keys() == two[part].keys()
        for key, value in one[part].items():
            if isinstance(value, torch.Tensor):
                assert torch.allclose(value, two[part][key], rtol=1e-3, atol=1e-4), key


def test_evaluation_and_normalizer_error_are_those_of_one_rank(folder):
    one, two = (json.loads((folder / name / "summary.json").read_text()) for name in ("one", "two"))
    assert two["evaluation"].keys() == one["evaluation"].keys()
    assert two["evaluation"][f"{folder}/several.captions"] == 76 and two["evaluation"][f"{folder}/several.skipped"] == 1
    error = [summary["normalizer_error"]["estimators"]["method"]["mean"] for summary in (one, two)]
    assert error[1] == pytest.approx(error[0], rel=1e-3)
    assert (folder / "two" / "report.html").exists() and two["samples_seen"] == one["samples_seen"]


@pytest.mark.parametrize("run", ["two", "norms"])
def test_what_the_ranks_measure_together_is_what_one_measures_with_the_model_that_they_leave(folder, run):
    """Also with BatchNorm, of which each rank has statistics of its own."""
    measured = json.loads((folder / run / "summary.json").read_text())["evaluation"]
    asked = {"retrieval": (f"{folder}/several",), "zero_shot": (f"{folder}/classes",), "batch_size": 7}
    assert measured == pytest.approx(api.evaluate(f"local-dir:{folder / run / 'model'}", **asked))


def test_ranks_that_see_other_held_out_data_are_refused(endings):
    assert endings[0]["elsewhere"].startswith("UserError: ranks see different held-out data: rank 0 sets of [40]")
    assert endings[1]["elsewhere"] == "left with 2"


def test_a_rank_that_fails_in_an_evaluation_ends_the_others(endings):
    assert endings[1]["broken"] == "RunFailed: the second rank lost its disk"
    assert endings[0]["broken"] == "left with 1"


def test_both_ranks_return_the_folder_and_one_prints(folder, endings):
    assert [ending["two"] for ending in endings] == [f"done {folder / 'two'}"] * 2
    assert (folder / "alive.log").read_text().count(f"Report: {folder / 'two'}") == 1


def test_ranks_share_the_cores(folder):
    found = json.loads((folder / "two" / "environment.json").read_text())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert found["processes"] == 2 and found["threads"] == max(1, cores // 2)


def test_chunks_on_two_ranks_give_the_losses_of_the_whole_batch(folder):
    assert measured(folder / "chunks") == pytest.approx(measured(folder / "one"), rel=1e-4)
    # Rounding differs in some digit of these 24 numbers, so the towers did run in chunks.
    assert any(measured(folder / "chunks", key) != measured(folder / "two", key) for key in ("loss", "gradient_norm"))


def test_ranks_that_store_features_together_train_as_if_each_computed_its_own(folder):
    stored, computed = (last_checkpoint(folder / name)["model"] for name in ("stored", "computed"))
    assert all(torch.equal(stored[key], computed[key]) for key in stored)
    assert measured(folder / "stored") == measured(folder / "computed")
    assert sorted(fault["id"] for fault in read_lines(RunFolder(folder / "stored").skipped)) == [7, 30, 51]
    counts = [np.fromfile(file, "<i4") for file in (folder / "cache" / "features").glob("*/counts")]
    assert [len(one) for one in counts] == [60, 60] and all(one.all() for one in counts)  # images and captions, all


def test_bad_samples_of_every_rank_are_in_one_list(folder, endings):
    listed = [fault["id"] for fault in read_lines(RunFolder(folder / "spoilt-run").skipped)]
    assert sorted(listed) == [7, 30, 51]  # each once: 96 samples are more than one epoch of 60
    assert sum(json.loads((folder / "spoilt-run" / "summary.json").read_text())["skipped"].values()) == 3
    assert not list((folder / "spoilt-run").glob("*.nowhere"))


def test_too_many_bad_samples_end_both_and_one_says_why(endings):
    assert endings[0]["bad"].startswith("RunFailed") and "skipped.jsonl" in endings[0]["bad"]
    assert endings[1]["bad"] == "left with 1"


def test_a_batch_that_does_not_divide_is_refused_before_anything_is_made(folder, endings):
    assert "does not divide over 2 ranks" in endings[0]["odd"]
    assert endings[1]["odd"] == "left with 2"
    assert not (folder / "odd").exists()


def test_ranks_with_different_settings_are_refused_by_the_name_of_the_setting(folder, endings):
    assert endings[0]["seeds"].startswith("UserError: run.seed is 0 on rank 0 and 1 on rank 1")
    assert endings[1]["seeds"] == "left with 2"
    assert not (folder / "seeds").exists()


def test_a_signal_during_an_evaluation_ends_all_ranks_with_what_was_saved_before_it(folder, endings):
    assert endings[0]["interrupted"].startswith("RunInterrupted: stopped and saved at 32 of 96")
    assert endings[1]["interrupted"] == "left with 143"
    assert last_checkpoint(folder / "interrupted")["step"] == 4
    assert not read_lines(RunFolder(folder / "interrupted").evaluation)


def test_a_signal_to_one_rank_stops_and_saves_all_after_the_same_step(folder, endings):
    assert endings[0]["stopped"].startswith("RunInterrupted: stopped and saved at 32 of 96")
    assert endings[1]["stopped"] == "left with 143"
    assert last_checkpoint(folder / "stopped")["step"] == 4


def test_a_killed_rank_ends_the_other_in_one_line(folder):
    lines = (folder / "killed.log").read_text().splitlines()
    ours = [line for line in lines if line.startswith("neuclip:")]
    assert len(ours) == 1 and "rank 1 of 2 has ended" in ours[0]
    assert not any("src/neuclip" in line for line in lines)  # torchrun has a traceback of its own; we have none


def test_killed_and_resumed_on_two_it_gives_the_same_losses_to_the_bit(folder, endings):
    assert endings[1]["resumed"].startswith("done")
    assert measured(folder / "killed") == measured(folder / "two")


def test_killed_on_two_it_can_go_on_on_one(folder):
    run = folder / "killed-too"
    assert last_checkpoint(run)["samples"] < STEPS * BATCH and len(last_checkpoint(run)["random"]["cpu"]) == 2
    api.train(settings_for(folder, "killed", "--evaluation.every", "0"), resume=run)
    assert measured(run) == pytest.approx(measured(folder / "one"), rel=1e-4)
