"""Folders of runs, with real processes that want the same one, and the checkpoints in them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from neuclip.errors import RunFailed, UserError
from neuclip.files import UNFINISHED, UNFINISHED_SECONDS
from neuclip.records import RunFolder
from neuclip.runs import folder as folders
from neuclip.runs.folder import (
    checkpoint_name,
    checkpoints_in,
    choose_folder,
    load_checkpoint,
    load_newest,
    lock,
    make_folder,
    run_to_continue,
    samples_at,
    save_checkpoint,
)
from neuclip.settings.reading import read_settings
from tests.builders.processes import Child, start


def settings_of(folder: Path, name: str = ""):
    return read_settings(None, ["--run.folder", str(folder), f"--run.name={name}"])


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".", "/tmp/x"])
def test_a_name_that_would_leave_the_folder_of_runs_is_refused(name, tmp_path):
    with pytest.raises(UserError, match=r"is a path; give --run\.name \w+ and its folder as --run\.folder"):
        choose_folder(settings_of(tmp_path / "runs", name))


@pytest.mark.parametrize(
    ("place", "name", "message"),
    [
        ("/proc/runs", "", "/proc/runs: cannot be written (No such file or directory); give another --run.folder"),
        ("{tmp}/file/runs", "", "runs: cannot be written (Not a directory); give another --run.folder"),
        ("{tmp}/" + "long/" * 1000, "", "cannot be written (File name too long); give another --run.folder"),
        ("{tmp}", "n" * 300, "cannot be written (File name too long); give another"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_in_one_line_before_anything_is_built(tmp_path, place, name, message):
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as refusal:
        choose_folder(settings_of(Path(place.format(tmp=tmp_path)), name))
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_empty_folder_is_free_and_any_other_is_not(tmp_path):
    settings = settings_of(tmp_path, "x")
    (tmp_path / "x").mkdir()
    assert make_folder(settings, {}).settings.exists()
    for again in (choose_folder, lambda settings: make_folder(settings, {})):
        with pytest.raises(UserError, match=r"x exists; give another --run\.name, or continue it"):
            again(settings)
    unnamed = settings_of(tmp_path)
    first = make_folder(unnamed, {}).path
    assert choose_folder(unnamed).name == f"{first.name}-2" and first.name.endswith("-neuclip-tiny")
    assert {path.name for path in tmp_path.iterdir()} == {"x", first.name}


def make_folders(folder: Path) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    print(*[make_folder(settings_of(folder), {}).path for _ in range(30)])


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
    RunFolder(tmp_path).lock.write_text(json.dumps({"process": 1, "host": "a longer name" * 40}))
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


def test_a_lock_that_is_a_link_into_somebody_elses_files_is_refused_in_one_line(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").symlink_to(tmp_path / "victim")
    refusal = r"run\.lock: cannot be written \(Too many levels of symbolic links\); remove it"
    with pytest.raises(UserError, match=refusal), lock(RunFolder(tmp_path / "run")):
        pytest.fail("it was followed")
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("name", ["", "named"])
def test_only_a_restart_of_the_same_torchrun_finds_its_run_again(tmp_path, monkeypatch, name):
    settings = settings_of(tmp_path, name)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    first = make_folder(settings, {}).path
    half = tmp_path / f".half.ab{UNFINISHED}"  # of an attempt that was killed while it made its folder
    half.mkdir()
    (half / "run.lock").write_bytes((first / "run.lock").read_bytes())
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "run.lock").write_text("damaged")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert run_to_continue(settings, None) is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert run_to_continue(settings, None) == first
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert run_to_continue(settings, None) is None


def test_auto_continues_the_run_of_that_name_if_there_is_one(tmp_path):
    settings = settings_of(tmp_path, "x")
    assert run_to_continue(settings, "auto") is None
    make_folder(settings, {})
    assert run_to_continue(settings, "auto") == tmp_path / "x" and run_to_continue(settings, None) is None
    assert run_to_continue(settings, Path("other")) == Path("other")
    with pytest.raises(UserError, match=r"--resume auto .*; give --run\.name too"):
        run_to_continue(settings_of(tmp_path), "auto")


def test_what_kills_left_is_removed_where_only_the_run_writes_and_elsewhere_when_it_is_old(tmp_path):
    run = RunFolder(tmp_path)
    places = [run.checkpoints / f".a{UNFINISHED}", run.path / f".old{UNFINISHED}", run.path / f".new{UNFINISHED}"]
    for place in places:
        place.mkdir(parents=True)
        (place / "x").write_text("half")
    age = places[1].stat().st_mtime - UNFINISHED_SECONDS - 9
    os.utime(places[1], (age, age))
    folders.remove_unfinished(run)
    assert [place.exists() for place in places] == [False, False, True]


# --- Checkpoints


EMPTY = dict.fromkeys(folders.PARTS)


def save(run: RunFolder, samples: int, keep: int = 2, **more) -> Path:
    save_checkpoint(run, EMPTY | {"model": torch.full((3,), samples)}, samples=samples, keep=keep, **more)
    return run.checkpoints / checkpoint_name(samples)


@pytest.fixture
def run(tmp_path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def test_only_the_newest_and_milestones_stay_and_they_load_without_running_code(run):
    for samples in (100, 20, 3000):
        save(run, samples)
    assert [path.name for path in checkpoints_in(run)] == [checkpoint_name(100), checkpoint_name(3000)]
    assert torch.equal(load_checkpoint(checkpoints_in(run)[-1])["model"], torch.full((3,), 3000))
    for samples in range(3010, 3070, 10):
        save(run, samples, milestones=[3020, 3060])
    assert [samples_at(path) for path in checkpoints_in(run)] == [3020, 3050, 3060]
    for value in (EMPTY | {"model": Path("x")}, {"model": 1}, [1, 2]):
        torch.save(value, run.checkpoints / checkpoint_name(4000))
        with pytest.raises(
            UserError, match=r"4000\.pt: is damaged, or not what it should be .*one before it is .*3060"
        ):
            load_checkpoint(run.checkpoints / checkpoint_name(4000))


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not count what is read")
def test_a_checkpoint_is_read_once(run):
    state = EMPTY | {"model": {"weights": torch.rand(2_000_000)}, "data": [torch.ones(2), 3]}
    save_checkpoint(run, state, samples=8, keep=2)
    size, before = checkpoints_in(run)[0].stat().st_size, bytes_read()
    _, loaded = load_newest(run)
    assert size <= bytes_read() - before < 1.1 * size
    assert torch.equal(loaded["model"]["weights"], state["model"]["weights"]) and loaded["data"][1] == 3
    checkpoints_in(run)[0].write_bytes(b"")  # what was loaded has its own memory
    assert loaded["model"]["weights"].sum() == state["model"]["weights"].sum()
