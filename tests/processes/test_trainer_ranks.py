"""One run on two ranks, in real processes: it does what one rank does, one writes, both stop and resume together."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neuclip import api
from neuclip.cli.main import main
from neuclip.data.held_out import HeldOutSets
from neuclip.distributed.collectives import rank
from neuclip.distributed.ranks import process_group
from neuclip.errors import RunFailed
from neuclip.evaluation import embedding
from neuclip.records import RunFolder, read_lines
from neuclip.runs import results
from neuclip.runs.results import evaluate_on_the_way
from neuclip.settings.sections import Settings
from neuclip.settings.writing import settings_as_yaml
from neuclip.training import stored_features
from neuclip.training.optimizer import TowerOptimizer
from neuclip.training.run import Run
from tests.builders.images import COLOURS, caption, image_bytes, write_shards
from tests.builders.models import NORMS_FILE, SMALL_FILE
from tests.builders.processes import on_ranks
from tests.builders.runs import BATCH, STEPS, last_checkpoint, losses, recorded, settings_for
from tests.evaluation.colour_shards import write_samples

pytestmark = pytest.mark.slow

LOCKED = ["--model.image_tower", "locked", "--model.text_tower", "locked", "--data.crop_scale", "1,1"]
COMPUTED = ["--data.stored_features", "off"]
UPDATE = TowerOptimizer.update


def settings_of(folder: Path, name: str, *flags: str) -> Settings:
    """21 prototypes do not divide over two ranks."""
    evaluated = ["--run.name", name, "--evaluation.every", str(4 * BATCH), "--evaluation.gallery", "0"]
    network = ["--objective.num_prototypes", "21", "--run.threads", "0"]
    return settings_for(folder, folder / "shards", *evaluated, *network, *flags, model=SMALL_FILE)


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


def held_out(folder: Path) -> list[str]:
    """Several captions per image, a bad one, and batches that divide over neither the images nor the ranks."""
    classes = ["--evaluation.zero_shot", str(folder / "classes")]
    return ["--evaluation.retrieval", str(folder / "several"), "--evaluation.batch_size", "7", *classes]


def run_scenarios(folder: Path) -> None:
    """Of one rank: runs, each to its end or to its failure, and how each ended."""
    with process_group(torch.device("cpu")):
        (folder / f"ended-{rank()}.json").write_text(json.dumps(scenarios(folder)))


def scenarios(folder: Path) -> dict[str, str]:
    stored_features.BLOCK = {"image": 8, "text": 8}  # for each rank some
    ask_second_to_stop = {"evaluate": lambda *_: signal.raise_signal(signal.SIGTERM) if rank() else None}
    spoilt = ["--data.train", str(folder / "spoilt")]
    bad = ["--data.train", str(folder / "bad"), "--train.samples", "240"]
    interrupted = ["--evaluation.retrieval", str(folder / "shards")]
    resumed = settings_of(folder, "killed", "--evaluation.every", "0")
    # What the second rank is told otherwise does not hold.
    measured = [*held_out(folder), "--evaluation.error_anchors", "20", "--run.seed", str(rank())]
    norms = [*held_out(folder), "--model.name", str(NORMS_FILE)]
    return {
        "two": ended(lambda: api.train(settings_of(folder, "two", *measured))),
        "norms": ended(lambda: api.train(settings_of(folder, "norms", *norms))),
        "broken": ended(lambda: api.train(settings_of(folder, "broken", *held_out(folder))), evaluate=broken),
        "chunks": ended(lambda: api.train(settings_of(folder, "chunks", "--train.micro_batch_size", "3"))),
        "stored": ended(lambda: api.train(settings_of(folder, "stored", *spoilt, *LOCKED))),
        "computed": ended(lambda: api.train(settings_of(folder, "computed", *spoilt, *LOCKED, *COMPUTED))),
        "spoilt": ended(lambda: api.train(settings_of(folder, "spoilt-run", *spoilt))),
        "bad": ended(lambda: api.train(settings_of(folder, "bad-run", *bad))),
        "odd": ended(lambda: api.train(settings_of(folder, "odd", "--train.batch_size", "9"))),
        "nan": ended(lambda: api.train(settings_of(folder, "nan", "--evaluation.every", "0")), update=spoil_second),
        "stopped": ended(lambda: api.train(settings_of(folder, "stopped")), **ask_second_to_stop),
        "interrupted": ended(lambda: api.train(settings_of(folder, "interrupted", *interrupted)), evaluate=stopped),
        "resumed": ended(lambda: api.train(resumed, resume=folder / "killed")),
    }


def ended(
    action: Callable[[], object],
    evaluate: Callable[..., None] = evaluate_on_the_way,
    update: Callable[..., Any] = UPDATE,
) -> str:
    results.evaluate_on_the_way, TowerOptimizer.update = evaluate, update
    try:
        return f"done {action()}"
    except SystemExit as left:
        return f"left with {left.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        results.evaluate_on_the_way, TowerOptimizer.update = evaluate_on_the_way, UPDATE


def spoil_second(optimizer: TowerOptimizer, loss: torch.Tensor, step: int) -> torch.Tensor:
    """The loss of the second rank is not a number in one step."""
    return UPDATE(optimizer, loss * torch.nan if rank() and step == 4 else loss, step)


def stopped(run: Run, sets: HeldOutSets) -> None:
    """The evaluation of the main rank gets SIGTERM at its first batch."""
    real = embedding.track

    def track(items: Iterable[Any], *_: object, **__: object) -> Iterator[Any]:
        for item in items:
            signal.raise_signal(signal.SIGTERM)
            yield item

    embedding.track = track
    try:
        evaluate_on_the_way(run, sets)
    finally:
        embedding.track = real


def broken(run: Run, sets: HeldOutSets) -> None:
    """The evaluation of the second rank fails at its first batch."""
    real = embedding.read_images

    def failing(*_: object, **__: object) -> Iterator[Any]:
        raise RunFailed("the second rank lost its disk")

    embedding.read_images = failing if rank() else real
    try:
        evaluate_on_the_way(run, sets)
    finally:
        embedding.read_images = real


def train_until_the_second_rank_dies(folder: Path) -> int:
    """It dies without a word while the first one goes on."""
    results.evaluate_on_the_way = lambda *_: os.kill(os.getpid(), signal.SIGKILL) if rank() else None
    return main(["train", str(folder / "killed.yaml")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """All runs: on one rank, on two of which one was killed, and all scenarios. Their cache is below it."""
    folder = tmp_path_factory.mktemp("processes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEUCLIP_CACHE", str(folder / "cache"))
        run_everything(folder)
        yield folder


def run_everything(folder: Path) -> None:
    write_held_out(folder)
    write_shards(folder / "shards", 40)
    write_shards(folder / "spoilt", 60, spoilt=[7, 30, 51])
    write_shards(folder / "bad", 120, spoilt=range(0, 120, 3))
    (folder / "killed.yaml").write_text(settings_as_yaml(settings_of(folder, "killed")))
    first, second = on_ranks(2, train_until_the_second_rank_dies, folder)
    assert (first.code, second.code) == (1, -signal.SIGKILL)
    (folder / "killed.log").write_text(first.errors)
    shutil.copytree(folder / "killed", folder / "killed-too")
    first, second = on_ranks(2, run_scenarios, folder)
    assert first.code == second.code == 0, first.errors + second.errors
    (folder / "alive.log").write_text("".join([first.output, first.errors, second.output, second.errors]))
    api.train(settings_of(folder, "one", *held_out(folder), "--evaluation.error_anchors", "20"))


@pytest.fixture(scope="module")
def endings(folder) -> list[dict[str, str]]:
    return [json.loads((folder / f"ended-{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_give_the_losses_and_the_weights_of_one_with_the_settings_of_the_first(folder):
    assert len(losses(folder / "two")) == STEPS
    for key in ("loss", "gradient_norm", "temperature", "accuracy", "mean_log_normalizer_image"):
        assert recorded(folder / "two", key) == pytest.approx(recorded(folder / "one", key), rel=1e-4)
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


def test_a_rank_that_fails_in_an_evaluation_ends_the_others(endings):
    assert endings[1]["broken"] == "RunFailed: the second rank lost its disk"
    assert endings[0]["broken"] == "left with 1"


def test_not_a_number_on_one_rank_ends_all_after_the_same_step_and_one_says_why(folder, endings):
    assert (
        endings[0]["nan"].startswith("RunFailed: not a number at step 4 (loss ") and endings[1]["nan"] == "left with 1"
    )
    assert last_checkpoint(folder / "nan")["step"] < 4


def test_both_ranks_return_the_folder_and_one_prints(folder, endings):
    assert [ending["two"] for ending in endings] == [f"done {folder / 'two'}"] * 2
    assert (folder / "alive.log").read_text().count(f"Report: {folder / 'two'}") == 1


def test_ranks_share_the_cores(folder):
    found = json.loads((folder / "two" / "environment.json").read_text())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert found["processes"] == 2 and found["threads"] == max(1, cores // 2)


def test_chunks_on_two_ranks_give_the_losses_of_the_whole_batch(folder):
    assert losses(folder / "chunks") == pytest.approx(losses(folder / "one"), rel=1e-4)
    # Rounding differs in some digit of these 24 numbers, so the towers did run in chunks.
    assert any(recorded(folder / "chunks", key) != recorded(folder / "two", key) for key in ("loss", "gradient_norm"))


def test_ranks_that_store_features_together_train_as_if_each_computed_its_own(folder):
    stored, computed = (last_checkpoint(folder / name)["model"] for name in ("stored", "computed"))
    assert all(torch.equal(stored[key], computed[key]) for key in stored)
    assert losses(folder / "stored") == losses(folder / "computed")
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
    assert not any("src/neuclip" in line for line in lines)


def test_killed_and_resumed_on_two_it_gives_the_same_losses_to_the_bit(folder, endings):
    assert endings[1]["resumed"].startswith("done")
    assert losses(folder / "killed") == losses(folder / "two")


def test_killed_on_two_it_can_go_on_on_one(folder):
    run = folder / "killed-too"
    assert last_checkpoint(run)["samples"] < STEPS * BATCH and len(last_checkpoint(run)["random"]["cpu"]) == 2
    api.train(settings_of(folder, "killed", "--evaluation.every", "0"), resume=run)
    assert losses(run) == pytest.approx(losses(folder / "one"), rel=1e-4)
