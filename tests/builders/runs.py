"""Runs of half a second: real towers on a few drawings, twelve steps of eight pairs, more than two epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from neuclip.records import RunFolder, read_lines
from neuclip.runs.folder import checkpoints_in, load_checkpoint
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings
from tests.builders.models import NORMS_FILE

BATCH, STEPS = 8, 12
TIMED = ("_share", "per_second")


def settings_for(folder: Path, data: Path, *flags: str, model: Path = NORMS_FILE) -> Settings:
    """Settings of a run below `folder`; `flags` come last. `model` is SMALL_FILE where only rounding may depend on how
    a batch is cut: it has neither BatchNorm nor dropout."""
    fixed = f"""--run.folder {folder} --run.threads 1 --data.train {data} --data.workers 0 --model.name {model}
        --train.batch_size {BATCH} --train.samples {STEPS * BATCH} --log.every 1
        --evaluation.every 0 --evaluation.error_anchors 0
        --checkpoint.every_minutes 0 --checkpoint.every_samples {3 * BATCH}""".split()
    other_objective = "--objective" in flags or "--objective.name" in flags
    network = [] if other_objective else ["--objective.num_prototypes", "20", "--objective.restart_every", "5"]
    return read_settings(None, [*fixed, *network, *flags])


def losses(run: Path) -> list[float]:
    return recorded(run, "loss")


def recorded(run: Path, key: str) -> list[float]:
    return [record[key] for record in read_lines(RunFolder(run).records)]


def last_checkpoint(run: Path) -> dict[str, Any]:
    return load_checkpoint(checkpoints_in(RunFolder(run))[-1])


def weights(run: Path) -> dict[str, torch.Tensor]:
    return last_checkpoint(run)["model"]


def summary(run: Path) -> dict[str, Any]:
    return json.loads(RunFolder(run).summary.read_text())


def assert_equal_runs(one: Path, other: Path) -> None:
    """Records but for times, figures, skipped samples and weights, to the bit."""
    assert traces(one) == traces(other)
    assert_equal_weights(weights(one), weights(other))


def traces(run: Path) -> list[list[dict[str, Any]]]:
    folder = RunFolder(run)
    lines = [read_lines(path) for path in (folder.records, folder.evaluation, folder.skipped)]
    return [[{key: x for key, x in line.items() if not key.endswith(TIMED)} for line in file] for file in lines]


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())
