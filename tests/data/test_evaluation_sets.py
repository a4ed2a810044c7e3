"""`neuclip data get`: evaluation sets from the hub, whole or not there; what is on the disk is read as it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from neuclip.cli.main import main
from neuclip.data.evaluation_sets import get_sets
from neuclip.data.task_sets import ZeroShotTask
from neuclip.tasks import choose_tasks, default_root
from tests.builders.data import (
    image_bytes,
    karpathy_entries,
    several,
    write_class_folders,
    write_files,
    write_images,
    write_puzzles,
    write_task,
)
from tests.builders.reading import failure, refusal
from tests.builders.server import REVISION, Hub, serving

TEXTURES = "wds_vtab-dtd_test"
COPY = f"djghosh/{TEXTURES}"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on this machine, which huggingface_hub takes for its own; it has the textures in two shards."""
    from huggingface_hub import constants

    write_task(tmp_path / "hub" / COPY, sizes=[5, 3])
    with serving(Hub(tmp_path / "hub")) as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


@pytest.fixture
def sets(tmp_path):
    return tmp_path / "sets"


def get(name, root, confirm=lambda copies: None):
    (got,) = get_sets(choose_tasks(name), root, confirm)
    return got


def sent(hub) -> set[str]:
    """Files that were downloaded since the last time."""
    names, hub.sent = set(hub.sent), []
    return names


def test_a_copy_of_the_hub_is_downloaded_without_its_training_part(hub, sets, capsys):
    write_task(hub.root / COPY / "train", sizes=[4])
    assert main(["data", "get", "dtd", "--to", str(sets), "--yes"]) == 0
    out, err = capsys.readouterr()
    folder = sets / TEXTURES
    assert out.splitlines() == [str(folder)]
    assert COPY in err and "warning: 8 images, the task has 1,880" in err
    assert len(ZeroShotTask.open(folder).source) == 8
    names = {"SOURCE.json", "classnames.txt", "test", "zeroshot_classification_templates.txt"}
    assert {path.name for path in folder.iterdir()} == names
    origin = json.loads((folder / "SOURCE.json").read_bytes())
    assert origin == {"task": "vtab/dtd", "repository": COPY, "revision": REVISION}


def test_after_a_break_only_what_is_missing_is_told_and_downloaded(hub, sets):
    told = []
    hub.missing.add("1.tar")
    message = failure(lambda: get("dtd", sets, told.extend))
    assert "Describable Textures: the hub could not be read" in message and "run the command again" in message
    assert not (sets / TEXTURES).exists()
    hub.missing.clear()
    sent(hub)
    assert get("dtd", sets, told.extend).status == "downloaded"
    names = sent(hub)
    assert "1.tar" in names and "0.tar" not in names
    assert told[0].bytes > told[1].bytes >= (sets / TEXTURES / "test" / "1.tar").stat().st_size
    assert get("dtd", sets).status == "there" and not sent(hub)


@pytest.mark.parametrize("name", ["0.tar", "classnames.txt"])
def test_a_set_that_came_damaged_never_has_its_name_and_the_next_call_gets_the_damaged_file(hub, sets, name):
    true = next((hub.root / COPY).rglob(name)).read_bytes()
    hub.lies[name] = b"\xff" * len(true)
    assert name in refusal(lambda: get("dtd", sets))
    assert not (sets / TEXTURES).exists()
    hub.lies.clear()
    sent(hub)
    assert get("dtd", sets).status == "downloaded"
    names = sent(hub)
    assert name in names and "1.tar" not in names


def test_the_other_family_of_copies_is_used_where_the_first_is_missing(hub, sets):
    (hub.root / "clip-benchmark").mkdir()
    (hub.root / COPY).rename(hub.root / "clip-benchmark" / "wds_vtab-dtd")
    got = get("dtd", sets)
    assert got.folder == sets / TEXTURES
    assert json.loads((got.folder / "SOURCE.json").read_bytes())["repository"] == "clip-benchmark/wds_vtab-dtd"


def test_a_task_without_a_copy_on_the_hub_is_told_and_the_others_are_got(hub, sets, capsys):
    assert main(["data", "get", "dtd", "mnist", "winogavil", "--to", str(sets), "--yes", "--json"]) == 1
    got = {one["task"]: one for one in json.loads(capsys.readouterr().out)}
    assert got["vtab/dtd"]["status"] == "downloaded" and got["misc/winogavil"]["folder"] is None
    assert f"put it, or a link to it, at {sets}" in got["misc/winogavil"]["status"]
    assert "clip-benchmark/wds_mnist: not on the hub, or not public" in got["mnist"]["status"]


def test_nothing_is_downloaded_unasked_or_without_room(hub, sets, capsys, monkeypatch):
    with open(os.devnull) as nobody:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdin", nobody)
        assert main(["data", "get", "dtd", "--to", str(sets)]) == 2
    err = capsys.readouterr().err
    assert "Describable Textures: 30.8 kB" in err
    assert "must be confirmed, but stdin is not a terminal; give --yes" in err
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=30_000))
    assert "30.8 kB are needed and 30 kB are free" in refusal(lambda: get("dtd", sets))
    assert not sent(hub) and not sets.exists()


@pytest.mark.slow
def test_the_command_reaches_the_hub_that_the_environment_names(hub, sets):
    command = [sys.executable, "-m", "neuclip", "data", "get", "dtd", "--to", str(sets), "--yes"]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert ended.stdout == f"{sets / TEXTURES}\n"


# What is on the disk already


def write_photos(folder):
    write_class_folders(folder, cat=3, sea_horse=4)


def write_captions(folder):
    rows = "image,caption\n0.png,one\n0.png,eins\n2.png,three\n1.png,two\n1.png,zwei\n"
    write_files(folder, {f"{number}.png": image_bytes(number) for number in range(3)} | {"captions.csv": rows})


def write_karpathy(folder):
    pairs = several([[f"photo {number} {k}" for k in range(5)] for number in range(3)])
    write_images(folder / "images", pairs)
    listed = {"images": karpathy_entries(pairs, ["test", "train", "test"]), "dataset": "flickr30k"}
    write_files(folder, {"dataset_flickr30k.json": json.dumps(listed)})


@pytest.mark.parametrize(
    ("task", "write", "counts", "note"),
    [
        ("dtd", write_photos, {"images": 7, "classes": 2}, "prompts are the default ones"),
        ("fmow", lambda folder: write_task(folder, sizes=[5, 2], with_metadata=True), {"images": 7, "classes": 6},
         "7 images, the task has 22,108"),
        ("geode", write_photos, {"images": 7, "classes": 2}, "0 numbers per image in npy members, the task has region"),
        ("flickr", write_captions, {"images": 3, "captions": 5}, "3 images, the task has 1,000"),
        ("flickr", write_karpathy, {"images": 2, "captions": 10}, "2 images, the task has 1,000"),
        ("winogavil", lambda folder: write_puzzles(folder, spell=repr), {"images": 6, "puzzles": 2},
         "2 puzzles, the task has 3,563"),
    ],
)  # fmt: skip
def test_a_set_that_is_there_is_checked_and_used_as_it_is_by_a_link_too(task, write, counts, note, tmp_path, sets):
    write(tmp_path / "mine")
    sets.mkdir()
    (sets / choose_tasks(task)[0].folder).symlink_to(tmp_path / "mine")
    got = get(task, sets)
    assert (got.status, got.counts) == ("there", counts)
    assert note in "; ".join(got.notes)


def test_a_broken_set_is_never_replaced_but_told(sets):
    folder = write_task(sets / TEXTURES, sizes=[2])
    (folder / "test" / "0.tar").unlink()
    message = refusal(lambda: get("dtd", sets))
    assert "0.tar: missing" in message and f"remove {folder} to download it again" in message


def test_the_list_shows_all_tasks_and_which_are_there(sets, capsys):
    write_task(sets / TEXTURES, sizes=[1])
    assert main(["data", "get", "--list", "--to", str(sets)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 38 and f"1 of 38 in {sets}" in err
    assert next(line for line in out.splitlines() if "there" in line).startswith("Describable Textures")
    assert max(map(len, out.splitlines())) <= 120
    assert main(["data", "get", "imagenet", "--list", "--to", str(sets), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == 7 and listed[0]["size"] == 50_000 and listed[0]["folder"] is None


def test_an_unknown_task_none_and_a_dropped_flag_are_one_line(capsys, cache):
    assert main(["data", "get", "imagenet-v2"]) == 2 and "did you mean imagenetv2?" in capsys.readouterr().err
    assert main(["data", "get"]) == 2 and "give datacomp for all" in capsys.readouterr().err
    assert main(["data", "get", "dtd", "--from", "here"]) == 2 and "no flag --from" in capsys.readouterr().err
    assert default_root() == cache / "evaluation-sets"
