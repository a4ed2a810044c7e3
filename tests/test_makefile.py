"""What each target of the Makefile installs, as `make --dry-run` prints it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def installs(target: str, folder: Path) -> list[str]:
    """The commands with which pip installs in a fresh checkout."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    printed = subprocess.run(["make", "--dry-run", target], cwd=folder, check=True, capture_output=True, text=True)
    return [line for line in printed.stdout.splitlines() if "pip install" in line]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_demo_installs_no_test_packages_and_pip_shows_its_progress(tmp_path):
    demo = installs("demo", tmp_path)
    assert len(demo) == 1 and demo[0].endswith("-e '.[demo]'")
    for target in ("install", "check", "test", "bench", "picture"):
        both = installs(target, tmp_path)
        assert both[0] == demo[0] and len(both) == 2 and both[1].endswith("-e '.[test]'"), target
    assert not any("quiet" in line or " -q" in line for line in both)
