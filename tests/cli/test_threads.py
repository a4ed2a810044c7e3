"""Waiting threads sleep instead of spinning, in every way to start the command, unless the user chose otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import neuclip
from neuclip.cli.threads import VARIABLES, let_threads_sleep


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """The variables as in a fresh shell, and restored after the test."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_waiting_threads_sleep_by_default():
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "1000"), ("KMP_BLOCKTIME", "200")]
)
def test_a_choice_of_the_user_is_kept(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    let_threads_sleep()
    assert {other: os.environ[other] for other in VARIABLES if other in os.environ} == {name: value}


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_torchs_thread_library_reads_it(monkeypatch, given):
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    monkeypatch.setenv("PYTHONPATH", str(Path(neuclip.__file__).parents[1]))
    if given:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    code = "from neuclip.cli.main import main; main(['--version']); import torch"  # which a command imports later
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    spins = [line.split("'")[1] for line in output.splitlines() if "GOMP_SPINCOUNT = " in line]
    if not spins:
        pytest.skip("torch is not built with libgomp, which prints its settings")
    assert (spins[0] == "0") == (given is None)
