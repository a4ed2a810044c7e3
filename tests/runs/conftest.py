from __future__ import annotations

from pathlib import Path

import pytest

from neuclip import api
from neuclip.records import RunFolder
from tests.builders.images import write_shards
from tests.builders.runs import BATCH, settings_for


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shapes"), 40)


@pytest.fixture(scope="session")
def small_settings(shards):
    """Settings of a run on 40 drawings: small_settings(folder, *flags)."""

    def make(folder: Path, *flags: str):
        return settings_for(folder, shards, *flags)

    return make


@pytest.fixture(scope="session")
def finished(small_settings, shards, tmp_path_factory) -> RunFolder:
    """A run that was evaluated twice on the way and never interrupted. No test may change it."""
    flags = ["--run.name", "whole", "--evaluation.retrieval", str(shards), "--evaluation.every", str(4 * BATCH)]
    folder = tmp_path_factory.mktemp("runs")
    return RunFolder(api.train(small_settings(folder, *flags, "--evaluation.error_anchors", "20")))
