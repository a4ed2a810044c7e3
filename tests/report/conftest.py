from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from neuclip.records import RunFolder
from tests.builders.run_folders import write_sample_run


@pytest.fixture(scope="session")
def untouched_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_sample_run(tmp_path_factory.mktemp("runs") / "first-run")


@pytest.fixture
def run(untouched_run: RunFolder, tmp_path: Path) -> RunFolder:
    """A finished NeuCLIP run, each test its own copy."""
    return RunFolder(shutil.copytree(untouched_run.path, tmp_path / "first-run"))
