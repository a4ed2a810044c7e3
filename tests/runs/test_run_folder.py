"""The folder of a run: its own, locked while it is trained, tidied up, with paths that mean the same from anywhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from neuclip import api
from neuclip.errors import RunFailed, UserError
from neuclip.files import UNFINISHED, UNFINISHED_SECONDS
from neuclip.records import RunFolder
from neuclip.runs.build import absolute_address
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import settings_as_yaml
from tests.builders import processes
from tests.builders.images import write_shards
from tests.builders.processes import at_write
from tests.builders.runs import BATCH

SHORT = ["--train.samples", str(BATCH)]


def test_an_empty_folder_is_free_and_any_other_is_not(train, tmp_path):
    (tmp_path / "runs" / "r").mkdir(parents=True)
    assert train(*SHORT).path == tmp_path / "runs" / "r"
    with pytest.raises(UserError, match=r"r exists; give another --run\.name, or continue it: neuclip train --resume"):
        train(*SHORT)
    unnamed = [train("--run.name=", *SHORT).path.name for _ in range(2)]
    assert unnamed[0].endswith("-neuclip-norms") and unnamed[1] == f"{unnamed[0]}-2"
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"r", *unnamed}


@pytest.mark.parametrize("name", ["", "r"])
def test_of_two_runs_that_start_at_once_the_slower_one_takes_another_folder_or_is_refused(train, tmp_path, name):
    """While the first writes its first files, a second one that began later is faster."""
    second: list[Path] = []
    meanwhile = at_write("environment.json", lambda: second.append(train(f"--run.name={name}", *SHORT).path))
    if name:
        with meanwhile, pytest.raises(UserError, match="r exists"):
            train(f"--run.name={name}", *SHORT)
    else:
        with meanwhile:
            assert train("--run.name=", *SHORT).path.name == f"{second[0].name}-2"
    assert all((folder / "summary.json").exists() for folder in (tmp_path / "runs").iterdir())


def resume(folder: Path) -> None:
    try:
        api.train(read_settings(folder / "settings.yaml"), resume=folder)
    except RunFailed as refused:
        print(refused)


@pytest.mark.slow
def test_a_run_in_training_is_locked_until_its_process_ends_even_if_a_worker_lives_on(small_settings, tmp_path):
    folder, saving = RunFolder(tmp_path / "runs" / "r"), f"samples-{3 * BATCH:012d}"
    settings = small_settings(tmp_path / "runs", "--run.name", "r", "--data.workers", "2")
    (tmp_path / "settings.yaml").write_text(settings_as_yaml(settings))
    outputs: list[str] = []
    with at_write(saving, lambda: outputs.append(processes.run(resume, folder.path).output)):
        api.train(settings)
    assert outputs[0].startswith(f"{folder.path} is being trained by process {os.getpid()} on ")
    assert outputs[0].endswith("; wait until it ends, or stop it\n")
    shutil.rmtree(folder.path)
    killed = processes.start(processes.killed_at_write, saving, ["train", str(tmp_path / "settings.yaml")])
    assert killed.ends() == -signal.SIGKILL  # its workers may live
    folder.lock.write_text(json.dumps({"process": 1, "host": "a longer name" * 40}))
    api.train(settings, resume=folder.path)
    assert json.loads(folder.lock.read_text())["process"] == os.getpid()
    killed.wait()


def test_what_kills_left_is_removed_where_only_the_run_writes_and_elsewhere_when_it_is_old(copied):
    places = [copied.checkpoints / f".a{UNFINISHED}", *(copied.path / f".{age}{UNFINISHED}" for age in ("old", "new"))]
    for place in places:
        place.mkdir()
        (place / "x").write_text("half")
    age = places[1].stat().st_mtime - UNFINISHED_SECONDS - 9
    os.utime(places[1], (age, age))
    api.train(read_settings(copied.settings), resume=copied.path)
    assert [place.exists() for place in places] == [False, False, True]


# --- Paths


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("photos", "{}/photos"),
        ("photos:3,pairs.csv:2", "{}/photos:3,{}/pairs.csv:2"),
        ("photos/{00000..00001}.tar", "{}/photos/{{00000..00001}}.tar"),
        ("photos/*.tar", "{}/photos/*.tar"),
        ("{photos/00000,photos/00001}.tar", "{}/{{photos/00000,photos/00001}}.tar"),
        ("a,b:3.csv", "{}/a,b:3.csv"),  # the name of one file
        ("./icons-30k", "{}/icons-30k"),  # a folder; without the dot it is a data set by name
        ("icons-30k,photos", "icons-30k,{}/photos"),
        ("s3://bucket/{0..9}.tar:2,https://host/a.tar?x=1,2", "s3://bucket/{{0..9}}.tar:2,https://host/a.tar?x=1,2"),
        ("/data/gone.csv,gone/*.tar", "/data/gone.csv,gone/*.tar"),  # the error names it as it was given
        ("mine=photos", "mine={}/photos"),  # a held-out set with a name of its own
        ("a=b", "{}/a=b"),  # and one without
        ("x=icons-30k/zero-shot/names", "x=icons-30k/zero-shot/names"),
        ("", ""),
    ],
)
def test_addresses_are_stored_so_that_they_mean_the_same_from_any_folder(given, stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path / "photos", 4)
    for name in ("pairs.csv", "a,b:3.csv"):
        (tmp_path / name).touch()
    for name in ("icons-30k", "a=b"):
        (tmp_path / name).mkdir()
    assert absolute_address(given) == stored.format(*[tmp_path] * 2)
    assert absolute_address(absolute_address(given)) == absolute_address(given)


def test_a_pattern_in_a_folder_whose_name_is_a_pattern_stays_as_it_is(tmp_path, monkeypatch):
    write_shards(tmp_path / "[x]" / "photos", 4)
    monkeypatch.chdir(tmp_path / "[x]")
    assert absolute_address("photos/*.tar") == "photos/*.tar"
    assert absolute_address("photos") == f"{tmp_path}/[x]/photos"
