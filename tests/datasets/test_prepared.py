"""Sets that are fetched; icons-30k, which is not, has its tests in icons/."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from neuclip.data.open import open_source
from neuclip.datasets import prepared as builtin
from neuclip.datasets.catalogue import catalogue
from neuclip.datasets.fetching import fetched, packages_folder
from neuclip.datasets.prepared import (
    dataset_folder,
    held_out,
    is_dataset_name,
    is_labelled,
    prepared_folder,
    resolve,
    unprepared,
)
from neuclip.errors import UserError

NAME = "iconify"
PACKAGE = catalogue()[NAME].packages[0]
NOT_PREPARED = f"{NAME} is not prepared; run: neuclip data prepare {NAME} (npm, 104 MB"
TOLD = "another process of this machine is building it; waiting\n"
CHILD = """
import dataclasses, sys
from neuclip.datasets import prepared as builtin
from neuclip.datasets import catalogue

def build(folder):
    folder.mkdir(exist_ok=True)
    for piece in "abc":
        if not (folder / piece).exists():
            (folder / piece).touch()
            print(piece, flush=True)
            if piece in sys.argv:
                sys.stdin.read()

sets = catalogue.catalogue()
sets["iconify"] = dataclasses.replace(sets["iconify"], build=build)
builtin.dataset_folder("iconify")
"""


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def quick_build(monkeypatch):
    """A build that unpacks the package and makes the parts."""
    packages_folder().mkdir(parents=True)
    with tarfile.open(packages_folder() / PACKAGE.file_pattern, "w:gz") as tar:
        member = tarfile.TarInfo("package/a")
        tar.addfile(member, io.BytesIO())
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        assert (fetched(PACKAGE) / "package" / "a").exists()
        for part in catalogue()[NAME].parts:
            (folder / part).mkdir(parents=True)

    monkeypatch.setitem(catalogue(), NAME, replace(catalogue()[NAME], build=build))
    return calls


def test_an_unprepared_set_is_not_built_unasked_but_named_with_the_command(empty_cache):
    for address in (NAME, f"{NAME}/new-drawings"):
        with pytest.raises(UserError) as told:
            open_source(address)
        assert str(told.value).startswith(NOT_PREPARED) and str(told.value).endswith("minutes)")
    assert unprepared(NAME).startswith(NOT_PREPARED)
    assert not empty_cache.exists()


def test_a_prepared_set_is_found_by_name_and_part(quick_build):
    folder = dataset_folder(NAME)
    assert folder == prepared_folder(catalogue()[NAME]) == dataset_folder(NAME)
    assert resolve(NAME) == folder / "train" and resolve(f"{NAME}/new-concepts/") == folder / "new-concepts"
    assert len(quick_build) == 1 and unprepared(NAME) == ""


def test_what_was_unpacked_goes_when_the_set_is_built(quick_build, empty_cache):
    dataset_folder(NAME)
    assert [path.name for path in packages_folder().iterdir()] == [PACKAGE.file_pattern]
    assert {path.name for path in empty_cache.iterdir() if path.is_dir()} == {"packages", dataset_folder(NAME).name}


def test_an_unknown_part_names_the_nearest_before_anything_is_built():
    with pytest.raises(UserError, match=f"nearest: {NAME}/new-concepts"):
        resolve(f"{NAME}/concepts")


def test_a_folder_of_ones_own_goes_before_a_set_that_is_fetched(tmp_path):
    (tmp_path / NAME / "train").mkdir(parents=True)
    assert not is_dataset_name(NAME) and resolve(NAME) is None and unprepared(NAME) == ""
    assert resolve(f"{NAME}/train") is None
    assert is_dataset_name(f"{NAME}/new-drawings")
    (tmp_path / "icons-30k").mkdir()
    assert is_dataset_name("icons-30k") and not is_dataset_name("./icons-30k")


def test_the_other_parts_are_what_a_model_is_tested_on():
    assert held_out(NAME) == builtin.HeldOut((f"{NAME}/new-drawings", f"{NAME}/new-concepts"), ())
    assert held_out("cifar-10") == builtin.HeldOut((), ())


def test_labels_are_no_captions():
    folder = prepared_folder(catalogue()["digits"]) / "zero-shot" / "test"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"^digits: has labels and no captions; give it as --evaluation\.zero_shot"):
        open_source("digits")


def start_child(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", CHILD, *arguments]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


@pytest.mark.skipif(builtin.fcntl is None, reason="no file locks here")
def test_who_waits_for_another_builder_is_told_so_and_builds_nothing():
    building = start_child("a")
    assert building.stdout and building.stdout.readline() == "a\n"
    waiting = start_child()
    too_long = threading.Timer(60, building.kill)  # only so that a build that says nothing does not hang the test
    too_long.start()
    assert waiting.stderr and waiting.stderr.readline() == TOLD
    too_long.cancel()
    assert building.communicate()[0] == "b\nc\n"
    assert waiting.communicate() == ("", "") and waiting.returncode == 0


@pytest.mark.skipif(builtin.fcntl is None, reason="no file locks here")
def test_a_killed_build_goes_on_where_it_was(empty_cache):
    killed = start_child("b")
    assert killed.stdout and [killed.stdout.readline() for _ in range(2)] == ["a\n", "b\n"]
    killed.kill()
    killed.communicate()
    assert not prepared_folder(catalogue()[NAME]).exists()
    assert start_child().communicate()[0] == "c\n"
    target = prepared_folder(catalogue()[NAME])
    assert [path.name for path in empty_cache.iterdir() if path.is_dir()] == [target.name]
    assert {path.name for path in target.iterdir()} == set("abc")


def test_a_labelled_set_is_told_from_data_before_it_is_prepared_and_wherever_the_cache_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "zero-shot"))
    with pytest.raises(UserError, match=r"--evaluation\.zero_shot digits"):
        open_source("digits")
    assert is_labelled("icons-30k/zero-shot/names") and not is_labelled("icons-30k")
