"""Folders of runs, with real processes that want the same one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from neuclip.cli.main import main
from neuclip.errors import RunFailed, UserError
from neuclip.records import RunFolder, read_lines
from neuclip.runs.folder import check_new, lock, make_folder, restarted_run
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import settings_as_yaml
from tests.builders.processes import Child, main_killed_at_step, of_rank, rank_variables, run, start
from tests.builders.runs import BATCH, STEPS, losses


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".", "/tmp/x"])
def test_a_name_that_would_leave_the_folder_of_runs_is_refused(name, tmp_path):
    with pytest.raises(UserError, match=r"is a path; give --run\.name \w+ and its folder as --run\.folder"):
        check_new(read_settings(None, ["--run.folder", str(tmp_path / "runs"), "--run.name", name]))


def test_an_empty_folder_is_free_and_any_other_is_not(tmp_path):
    settings = read_settings(None, ["--run.folder", str(tmp_path), "--run.name", "x"])
    (tmp_path / "x").mkdir()
    assert make_folder(settings, {}).settings.exists()
    for again in (check_new, lambda settings: make_folder(settings, {})):
        with pytest.raises(UserError, match=r"x exists; give another --run\.name, or continue it"):
            again(settings)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def make_folders(folder: Path) -> None:
    settings = read_settings(None, ["--run.folder", str(folder)])
    print("ready", flush=True)
    sys.stdin.readline()
    print(*[make_folder(settings, {}).path for _ in range(30)])


def start_and_wait_until_ready(function: Callable[..., None], folder: Path) -> Child:
    child = start(function, folder)
    assert child.stdout.readline() == "ready\n"
    return child


def test_runs_that_start_at_once_without_a_name_get_folders_of_their_own(tmp_path):
    children = [start_and_wait_until_ready(make_folders, tmp_path) for _ in range(3)]
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    made = [folder for child in children for folder in child.wait().output.split()]
    assert len(made) == len(set(made)) == 90
    assert {str(path) for path in tmp_path.iterdir()} == set(made)


def hold_lock(folder: Path) -> None:
    with lock(RunFolder(folder)):
        if os.fork() == 0:  # as a data worker, which outlives its parent
            sys.stdin.readline()
            os._exit(0)
        print("ready", flush=True)
        os.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_run_in_training_is_locked_until_its_process_ends_even_if_a_worker_lives_on(tmp_path):
    holder = start_and_wait_until_ready(hold_lock, tmp_path)
    try:
        message = rf"is being trained by process {holder.pid} on \S+; wait"
        with pytest.raises(RunFailed, match=message), lock(RunFolder(tmp_path)):
            pytest.fail("two at once")
        holder.signal(signal.SIGKILL)
        assert holder.ends() == -signal.SIGKILL
        with lock(RunFolder(tmp_path)):
            assert json.loads(RunFolder(tmp_path).lock.read_text())["process"] == os.getpid()
    finally:
        holder.stdin.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.slow
def test_a_second_resume_of_a_run_is_refused_and_writes_nothing(finished, tmp_path, capsys):
    folder = shutil.copytree(finished.path, tmp_path / "run")
    holder = start_and_wait_until_ready(hold_lock, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main(["train", "--resume", str(folder)]) == 1
    assert f"is being trained by process {holder.pid}" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    holder.wait()


def test_only_a_restart_of_the_same_torchrun_finds_its_run_again(tmp_path, monkeypatch):
    settings = read_settings(None, ["--run.folder", str(tmp_path)])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    first = make_folder(settings, {})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert restarted_run(settings) is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert restarted_run(settings) == first.path
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert restarted_run(settings) is None


DIES_ONCE = """
import os, signal, sys
from neuclip.cli.main import main
from neuclip.training import loop
take_step = loop.take_step
def die_at_first(run, *rest):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and run.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return take_step(run, *rest)
loop.take_step = die_at_first
sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.fixture
def settings_file(small_settings, tmp_path):
    """Of a run below `runs`, by its name."""

    def write(name: str) -> str:
        settings = small_settings(tmp_path / "runs", "--run.name", name, "--evaluation.every", str(5 * BATCH))
        (tmp_path / "settings.yaml").write_text(settings_as_yaml(settings))
        return str(tmp_path / "settings.yaml")

    return write


def assert_went_on(folder: Path, errors: str, finished: RunFolder) -> None:
    (run,) = folder.iterdir()
    assert f"from {3 * BATCH:,} to {STEPS * BATCH:,} samples" in errors
    assert losses(run) == losses(finished.path) and len(read_lines(RunFolder(run).records)) == STEPS


@pytest.mark.slow
def test_a_run_without_a_name_that_torchrun_restarts_goes_on_from_its_last_checkpoint(
    finished, settings_file, tmp_path
):
    (tmp_path / "dies_once.py").write_text(DIES_ONCE)
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--max-restarts=1", *rendezvous]
    ended = subprocess.run(
        [*torchrun, str(tmp_path / "dies_once.py"), settings_file("")], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert_went_on(tmp_path / "runs", ended.stderr, finished)


@pytest.mark.slow
def test_a_run_with_a_name_that_is_restarted_goes_on_too(finished, settings_file, tmp_path, monkeypatch):
    train = ["train", settings_file("named")]
    for name, value in (rank_variables(1) | of_rank(0)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")  # as torchrun has it
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert main_killed_at_step(4, train).code == -signal.SIGKILL
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    restarted = run(main, train)
    assert restarted.code == 0, restarted.errors
    assert_went_on(tmp_path / "runs", restarted.errors, finished)
