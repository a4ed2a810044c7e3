"""One run on two ranks, in real processes: it does what one rank does, one writes, both stop and resume together."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from neuclip import api
from neuclip.cli.main import main
from neuclip.distributed.ranks import process_group
from neuclip.records import RunFolder, read_lines
from neuclip.settings.sections import Settings
from neuclip.settings.writing import settings_as_yaml
from neuclip.training import stored_features
from tests.builders.data import Pair, write, write_task
from tests.builders.images import COLOURS, caption, image_bytes, write_shards
from tests.builders.models import NORMS_FILE, SMALL_FILE
from tests.builders.processes import at_image, on_ranks
from tests.builders.runs import (
    BATCH,
    STEPS,
    assert_equal_runs,
    last_checkpoint,
    losses,
    recorded,
    settings_for,
    summary,
)

pytestmark = pytest.mark.slow

LOCKED = ["--model.image_tower", "locked", "--model.text_tower", "locked", "--data.crop_scale", "1,1"]
AFTER_FOUR_STEPS = 4 * BATCH // 2 + 1  # the next image that a rank of two reads, of the fifth batch or an evaluation


def settings_of(folder: Path, name: str, *flags: str) -> Settings:
    """21 prototypes do not divide over two ranks."""
    evaluated = ["--run.name", name, "--evaluation.every", str(4 * BATCH), "--evaluation.gallery", "0"]
    network = ["--objective.num_prototypes", "21", "--run.threads", "0"]
    return settings_for(folder, folder / "data" / "shards", *evaluated, *network, *flags, model=SMALL_FILE)


def write_data(data: Path) -> None:
    """`several`: 40 images, one of them bad, with one to three captions, some equal. `classes`: 40 images."""
    write_shards(data / "shards", 40)
    write_shards(data / "spoilt", 60, spoilt=[7, 30, 51])
    write_shards(data / "bad", 120, spoilt=range(0, 120, 3))
    captions = [(caption(n), f"{caption(n)} {n}", caption(n + 8))[: 1 + n % 3] for n in range(40)]
    pairs = [Pair(f"{number:03d}.png", image_bytes(number), own) for number, own in enumerate(captions)]
    write("tar", data / "several", pairs, spoilt=[11])
    write_task(data / "classes", sizes=(40,), classnames=COLOURS[:6])


def scenarios(folder: Path) -> dict[str, list[str]]:
    """Flags of each run. Different flags of the second rank have no effect."""
    data = folder / "data"
    # Batches that divide over neither the images nor the ranks.
    held_out = f"--evaluation.retrieval {data}/several --evaluation.zero_shot {data}/classes --evaluation.batch_size 7"
    spoilt = ["--data.train", str(data / "spoilt")]
    never = ["--evaluation.every", "0"]
    return {
        "two": [*held_out.split(), "--evaluation.error_anchors", "20", "--run.seed", os.environ.get("RANK", "0")],
        "norms": [*held_out.split(), "--model.name", str(NORMS_FILE)],
        "broken": held_out.split(),
        "chunks": ["--train.micro_batch_size", "3"],
        "stored": [*spoilt, *LOCKED],
        "computed": [*spoilt, *LOCKED, "--data.stored_features", "off"],
        "spoilt": spoilt,
        "bad": ["--data.train", str(data / "bad"), "--train.samples", "240"],
        "odd": ["--train.batch_size", "9"],
        "nan": never,
        "stopped": never,
        "interrupted": ["--evaluation.retrieval", str(data / "shards")],
        "killed": never,  # before, and continues
    }


def fail() -> None:
    raise MemoryError("of the second rank")


@contextmanager
def fifth_gradient_not_a_number() -> Iterator[None]:
    scale, steps = torch.amp.GradScaler.scale, count()
    spoilt = lambda scaler, loss: scale(scaler, loss * torch.nan if next(steps) == 4 else loss)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp.GradScaler, "scale", spoilt)
        yield


def happening(name: str) -> AbstractContextManager[None]:
    """What happens to this rank in a run."""
    terminate = lambda: signal.raise_signal(signal.SIGTERM)  # noqa: E731
    of_rank = {
        ("broken", "1"): at_image(AFTER_FOUR_STEPS, fail),
        ("nan", "1"): fifth_gradient_not_a_number(),
        ("stopped", "1"): at_image(AFTER_FOUR_STEPS, terminate),
        ("interrupted", "0"): at_image(AFTER_FOUR_STEPS + 1, terminate),
    }
    return of_rank.get((name, os.environ["RANK"]), nullcontext())


def run_scenarios(folder: Path) -> None:
    """Of one rank: each run to its end or to its failure, and how it ended."""
    stored_features.BLOCK = {"image": 8, "text": 8}  # for each rank some
    endings = {}
    with process_group(torch.device("cpu")):
        for name, flags in scenarios(folder).items():
            try:
                with happening(name):
                    endings[name] = f"done {api.train(settings_of(folder, name, *flags), resume='auto')}"
            except SystemExit as left:
                endings[name] = f"left with {left.code}"
            except Exception as error:
                endings[name] = f"{type(error).__name__}: {error}"
    (folder / f"ended-{os.environ['RANK']}.json").write_text(json.dumps(endings))


def train_until_the_second_rank_dies(folder: Path) -> int:
    """It dies without a word while the first one goes on."""
    kill = at_image(AFTER_FOUR_STEPS, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with kill if os.environ["RANK"] == "1" else nullcontext():
        return main(["train", str(folder / "killed.yaml")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """All runs: on one rank, on two of which one was killed, and all scenarios. Their cache is below it."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEUCLIP_CACHE", str(folder / "cache"))
        write_data(folder / "data")
        (folder / "killed.yaml").write_text(settings_as_yaml(settings_of(folder, "killed")))
        first, second = on_ranks(2, train_until_the_second_rank_dies, folder)
        assert (first.code, second.code) == (1, -signal.SIGKILL)
        (folder / "killed.log").write_text(first.errors)
        shutil.copytree(folder / "killed", folder / "killed-too")
        first, second = on_ranks(2, run_scenarios, folder)
        assert first.code == second.code == 0, first.errors + second.errors
        (folder / "alive.log").write_text("".join([first.output, first.errors, second.output, second.errors]))
        api.train(settings_of(folder, "one", *scenarios(folder)["two"]))
        yield folder


@pytest.fixture(scope="module")
def endings(folder) -> dict[str, tuple[str, str]]:
    """Of each run, how it ended on the first rank and on the second."""
    first, second = (json.loads((folder / f"ended-{rank}.json").read_text()) for rank in range(2))
    return {name: (first[name], second[name]) for name in first}


# --- What the ranks do together is what one does


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


def test_chunks_on_two_ranks_give_the_losses_of_the_whole_batch(folder):
    assert losses(folder / "chunks") == pytest.approx(losses(folder / "one"), rel=1e-4)
    # Rounding differs in some digit of these 24 numbers, so the towers did run in chunks.
    assert any(recorded(folder / "chunks", key) != recorded(folder / "two", key) for key in ("loss", "gradient_norm"))


def test_evaluation_and_normalizer_error_are_those_of_one_rank(folder):
    one, two = (summary(folder / name) for name in ("one", "two"))
    assert two["evaluation"].keys() == one["evaluation"].keys()
    several = f"{folder}/data/several"
    assert two["evaluation"][f"{several}.captions"] == 76 and two["evaluation"][f"{several}.skipped"] == 1
    error = [found["normalizer_error"]["estimators"]["method"]["mean"] for found in (one, two)]
    assert error[1] == pytest.approx(error[0], rel=1e-3)
    assert (folder / "two" / "report.html").exists() and two["samples_seen"] == one["samples_seen"]


@pytest.mark.parametrize("run", ["two", "norms"])
def test_what_the_ranks_measure_together_is_what_one_measures_with_the_model_that_they_leave(folder, run):
    """Also with BatchNorm, of which each rank has statistics of its own."""
    data = folder / "data"
    asked = {"retrieval": (f"{data}/several",), "zero_shot": (f"{data}/classes",), "batch_size": 7}
    want = api.evaluate(f"local-dir:{folder / run / 'model'}", **asked)
    assert summary(folder / run)["evaluation"] == pytest.approx(want)


def test_ranks_that_store_features_together_train_as_if_each_computed_its_own(folder):
    assert_equal_runs(folder / "stored", folder / "computed")
    counts = [np.fromfile(file, "<i4") for file in (folder / "cache" / "features").glob("*/counts")]
    assert [len(one) for one in counts] == [60, 60] and all(one.all() for one in counts)  # images and captions, all


def test_ranks_share_the_cores_and_one_of_them_prints(folder, endings):
    found = json.loads((folder / "two" / "environment.json").read_text())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert found["processes"] == 2 and found["threads"] == max(1, cores // 2)
    assert endings["two"] == (f"done {folder / 'two'}",) * 2
    assert (folder / "alive.log").read_text().count(f"Report: {folder / 'two'}") == 1


def test_bad_samples_of_every_rank_are_in_one_list(folder):
    listed = [fault["id"] for fault in read_lines(RunFolder(folder / "spoilt").skipped)]
    assert sorted(listed) == [7, 30, 51]  # each once: 96 samples are more than one epoch of 60
    assert sum(summary(folder / "spoilt")["skipped"].values()) == 3


# --- They end together


@pytest.mark.parametrize(
    ("name", "first", "second", "saved"),
    [
        ("broken", "left with 1", "MemoryError: of the second rank", 4),
        ("nan", "RunFailed: NaN or infinity at step 4 (loss ", "left with 1", 3),
        ("bad", "RunFailed: ", "left with 1", None),
        ("odd", "UserError: ", "left with 2", None),
        ("stopped", "RunInterrupted: stopped and saved at 32 of 96", "left with 143", 4),
        ("interrupted", "RunInterrupted: stopped and saved at 32 of 96", "left with 143", 4),
    ],
)
def test_whatever_happens_to_one_rank_both_end_after_the_same_step_and_one_says_why(
    folder, endings, name, first, second, saved
):
    """A failed evaluation, a gradient, too many bad samples, a batch that does not divide, signals."""
    assert endings[name][0].startswith(first) and endings[name][1] == second
    assert saved is None or last_checkpoint(folder / name)["step"] == saved
    assert not RunFolder(folder / name).summary.exists()
    if name == "bad":
        assert "skipped.jsonl" in endings["bad"][0]
    if name == "odd":
        assert "does not divide over 2 ranks" in endings["odd"][0] and not (folder / "odd").exists()
    if name == "interrupted":
        assert not read_lines(RunFolder(folder / "interrupted").evaluation)


def test_a_killed_rank_ends_the_other_in_one_line(folder):
    lines = (folder / "killed.log").read_text().splitlines()
    ours = [line for line in lines if line.startswith("neuclip:")]
    assert len(ours) == 1 and "rank 1 of 2 has ended" in ours[0]
    assert not any("src/neuclip" in line for line in lines)


def test_killed_on_two_it_goes_on_to_the_bit_on_two_and_to_rounding_on_one(folder, endings):
    assert endings["killed"][1].startswith("done") and losses(folder / "killed") == losses(folder / "two")
    run, before = folder / "killed-too", last_checkpoint(folder / "killed-too")
    assert before["samples"] == 4 * BATCH and len(before["random"]["cpu"]) == 2
    api.train(settings_of(folder, "killed", "--evaluation.every", "0"), resume=run)
    assert losses(run) == pytest.approx(losses(folder / "one"), rel=1e-4)
