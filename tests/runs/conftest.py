from __future__ import annotations

from pathlib import Path

import pytest

from neuclip import api
from neuclip.records import RunFolder, read_lines
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings
from tests.builders.images import write_shards

STEPS, BATCH = 12, 8


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shapes"), 40)


@pytest.fixture(scope="session")
def small_settings(shards):
    """Settings of a run of seconds: a real model on 40 drawings, 12 steps of 8 (more than two epochs)."""

    def make(folder: Path, *flags: str) -> Settings:
        fixed = f"""--run.folder {folder} --run.threads 1 --data.workers 0 --model.image_size 32
            --train.batch_size {BATCH} --train.samples {STEPS * BATCH} --evaluation.every 0
            --evaluation.error_anchors 0 --log.every 1 --checkpoint.every_minutes 0
            --checkpoint.every_samples {3 * BATCH}""".split()
        small = [] if "clip" in flags else ["--objective.num_prototypes", "20", "--objective.restart_every", "5"]
        return read_settings(None, [*fixed, "--data.train", str(shards), *small, *flags])

    return make


@pytest.fixture(scope="session")
def finished(small_settings, shards, tmp_path_factory) -> RunFolder:
    """A run that was evaluated twice on the way and never interrupted. No test may change it."""
    flags = ["--run.name", "whole", "--evaluation.retrieval", str(shards), "--evaluation.every", str(4 * BATCH)]
    folder = tmp_path_factory.mktemp("runs")
    return RunFolder(api.train(small_settings(folder, *flags, "--evaluation.error_anchors", "20")))


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_lines(RunFolder(folder).records)]
