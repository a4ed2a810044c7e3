from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from neuclip import api
from neuclip.records import RunFolder
from tests.builders.images import write_shards, write_table
from tests.builders.runs import BATCH, settings_for


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shapes"), 40)


@pytest.fixture
def table(tmp_path) -> Path:
    return write_table(tmp_path)


@pytest.fixture(scope="session")
def small_settings(shards):
    """Settings of a run on 40 drawings: small_settings(folder, *flags)."""
    return lambda folder, *flags: settings_for(folder, shards, *flags)


@pytest.fixture(scope="session")
def finished(small_settings, shards, tmp_path_factory) -> RunFolder:
    """A run that was evaluated twice on the way and never interrupted. No test may change it."""
    flags = ["--run.name", "whole", "--evaluation.retrieval", str(shards), "--evaluation.every", str(4 * BATCH)]
    folder = tmp_path_factory.mktemp("runs")
    return RunFolder(api.train(small_settings(folder, *flags, "--evaluation.error_anchors", "20")))


@pytest.fixture
def copied(finished, tmp_path) -> RunFolder:
    """The finished run, to write into."""
    return RunFolder(shutil.copytree(finished.path, tmp_path / "whole"))


@pytest.fixture
def train(small_settings, tmp_path):
    """A run in `runs` on the drawings: train(*flags), its folder. It is called `r`, or as the flags say."""

    def train(*flags: str, **options) -> RunFolder:
        settings = small_settings(tmp_path / "runs", "--run.name", "r", *flags)
        return RunFolder(api.train(settings, **options))

    return train
