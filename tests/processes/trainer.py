"""What the ranks of test_trainer_ranks.py run: `-m tests.processes.trainer scenarios FOLDER`, or `dies FOLDER`."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from neuclip import api
from neuclip.data.held_out import HeldOutSets
from neuclip.distributed.collectives import rank
from neuclip.distributed.error_sync import process_group
from neuclip.errors import RunFailed
from neuclip.evaluation import embedding
from neuclip.runs import results
from neuclip.runs.results import evaluate_on_the_way
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings
from neuclip.training import stored_features
from neuclip.training.run import Run

BATCH, STEPS = 8, 12
LOCKED = ["--model.image_tower", "locked", "--model.text_tower", "locked", "--data.crop_scale", "1,1"]
COMPUTED = ["--data.stored_features", "off"]


def settings_for(folder: Path, name: str, *flags: str) -> Settings:
    """A run of seconds: transformers without BatchNorm or dropout, so that only rounding depends on the ranks."""
    fixed = f"""--run.folder {folder} --run.name {name} --data.train {folder}/shards --data.workers 0
        --model.name {folder}/small.json --train.batch_size {BATCH} --train.samples {STEPS * BATCH} --log.every 1
        --objective.num_prototypes 21 --objective.restart_every 5 --evaluation.every {4 * BATCH}
        --evaluation.error_anchors 0 --evaluation.gallery 0
        --checkpoint.every_minutes 0 --checkpoint.every_samples {3 * BATCH}""".split()
    return read_settings(None, [*fixed, *flags])


def held_out(folder: Path) -> list[str]:
    """Several captions per image, a bad one, and batches that divide over neither the images nor the ranks."""
    classes = ["--evaluation.zero_shot", str(folder / "classes")]
    return ["--evaluation.retrieval", str(folder / "several"), "--evaluation.batch_size", "7", *classes]


def scenarios(folder: Path) -> dict[str, Any]:
    """Runs, each to its end or to its failure; how each ended on this rank."""
    stored_features.BLOCK = {"image": 8, "text": 8}  # for each rank some
    ask_second_to_stop = {"evaluate": lambda *_: signal.raise_signal(signal.SIGTERM) if rank() else None}
    spoilt = ["--data.train", str(folder / "spoilt")]
    bad = ["--data.train", str(folder / "bad"), "--train.samples", "240"]
    interrupted = ["--evaluation.retrieval", str(folder / "shards")]
    resumed = settings_for(folder, "killed", "--evaluation.every", "0")
    measured = [*held_out(folder), "--evaluation.error_anchors", "20"]
    norms = [*held_out(folder), "--model.name", str(folder / "norms.json")]
    elsewhere = ["--evaluation.retrieval", str(folder / ("spoilt" if rank() else "several"))]
    return {
        "two": ended(lambda: api.train(settings_for(folder, "two", *measured))),
        "norms": ended(lambda: api.train(settings_for(folder, "norms", *norms))),
        "elsewhere": ended(lambda: api.train(settings_for(folder, "elsewhere", *elsewhere))),
        "broken": ended(lambda: api.train(settings_for(folder, "broken", *held_out(folder))), evaluate=broken),
        "chunks": ended(lambda: api.train(settings_for(folder, "chunks", "--train.micro_batch_size", "3"))),
        "stored": ended(lambda: api.train(settings_for(folder, "stored", *spoilt, *LOCKED))),
        "computed": ended(lambda: api.train(settings_for(folder, "computed", *spoilt, *LOCKED, *COMPUTED))),
        "spoilt": ended(lambda: api.train(settings_for(folder, "spoilt-run", *spoilt))),
        "bad": ended(lambda: api.train(settings_for(folder, "bad-run", *bad))),
        "odd": ended(lambda: api.train(settings_for(folder, "odd", "--train.batch_size", "9"))),
        "stopped": ended(lambda: api.train(settings_for(folder, "stopped")), **ask_second_to_stop),
        "seeds": ended(lambda: api.train(settings_for(folder, "seeds", "--run.seed", str(rank())))),
        "interrupted": ended(lambda: api.train(settings_for(folder, "interrupted", *interrupted)), evaluate=stopped),
        "resumed": ended(lambda: api.train(resumed, resume=folder / "killed")),
    }


def ended(action: Callable[[], object], evaluate: Callable[..., None] | None = None) -> str:
    real = results.evaluate_on_the_way
    results.evaluate_on_the_way = evaluate or real
    try:
        return f"done {action()}"
    except SystemExit as left:
        return f"left with {left.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        results.evaluate_on_the_way = real


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

    def read_images(*_: object, **__: object) -> Iterator[Any]:
        raise RunFailed("the second rank lost its disk")

    embedding.read_images = read_images if rank() else real
    try:
        evaluate_on_the_way(run, sets)
    finally:
        embedding.read_images = real


def killed(*_: object) -> None:
    """The second rank dies without a word while the first one goes on."""
    if rank():
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    if sys.argv[1] == "dies":
        results.evaluate_on_the_way = killed
        sys.argv = ["neuclip", "train", str(folder / "killed.yaml")]
        runpy.run_module("neuclip", run_name="__main__", alter_sys=True)
    with process_group(torch.device("cpu")):
        (folder / f"ended-{rank()}.json").write_text(json.dumps(scenarios(folder)))
