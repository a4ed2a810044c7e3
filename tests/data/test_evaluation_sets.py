from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from neuclip.cli.main import main
from neuclip.data import evaluation_sets
from neuclip.data.evaluation_sets import get_sets
from neuclip.data.task_sets import ZeroShotTask
from neuclip.errors import RunFailed, UserError
from neuclip.tasks import choose_tasks, default_root
from tests.builders.data import (
    PUZZLES,
    image_bytes,
    write_class_folders,
    write_puzzle_images,
    write_puzzle_table,
    write_task,
)
from tests.builders.server import REVISION, Hub, serving

TEXTURES = "wds_vtab-dtd_test"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on this machine, which huggingface_hub takes for its own."""
    from huggingface_hub import constants

    with serving(Hub(tmp_path / "hub")) as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


def get(name, root, agree=lambda copies: None):
    (got,) = get_sets(choose_tasks(name), root, agree)
    return got


def test_a_copy_of_the_hub_is_downloaded_without_its_training_part(hub, tmp_path, capsys):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[5, 3])
    write_task(hub.root / "djghosh" / TEXTURES / "train", sizes=[4])
    assert main(["data", "get", "dtd", "--to", str(tmp_path / "sets"), "--yes"]) == 0
    out, err = capsys.readouterr()
    folder = tmp_path / "sets" / TEXTURES
    assert out.splitlines() == [str(folder)]
    assert "djghosh/wds_vtab-dtd_test" in err and "warning: 8 images, the task has 1,880" in err
    assert len(ZeroShotTask.open(folder).source) == 8
    names = {"SOURCE.json", "classnames.txt", "test", "zeroshot_classification_templates.txt"}
    assert {path.name for path in folder.iterdir()} == names
    origin = json.loads((folder / "SOURCE.json").read_bytes())
    assert origin == {"task": "vtab/dtd", "repository": f"djghosh/{TEXTURES}", "revision": REVISION}


def test_after_a_break_only_what_is_missing_is_told_and_downloaded(hub, tmp_path):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[5, 3])
    told = []
    hub.missing.add("1.tar")
    with pytest.raises(RunFailed, match=r"Describable Textures: the hub could not be read .* run the command again"):
        get("dtd", tmp_path / "sets", told.extend)
    assert not (tmp_path / "sets" / TEXTURES).exists()
    hub.missing.clear()
    hub.sent.clear()
    assert get("dtd", tmp_path / "sets", told.extend).status == "downloaded"
    assert "1.tar" in {name for name, _ in hub.sent} and "0.tar" not in {name for name, _ in hub.sent}
    assert told[0].bytes > told[1].bytes >= (tmp_path / "sets" / TEXTURES / "test" / "1.tar").stat().st_size
    hub.sent.clear()
    assert get("dtd", tmp_path / "sets").status == "there" and hub.sent == []


@pytest.mark.parametrize("name", ["0.tar", "classnames.txt"])
def test_a_set_that_came_damaged_never_has_its_name_and_the_next_call_gets_the_damaged_file(hub, tmp_path, name):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[5, 3])
    true = next((hub.root / "djghosh" / TEXTURES).rglob(name)).read_bytes()
    hub.lies[name] = b"\xff" * len(true)
    with pytest.raises(UserError, match=name):
        get("dtd", tmp_path / "sets")
    assert not (tmp_path / "sets" / TEXTURES).exists()
    hub.lies.clear()
    hub.sent.clear()
    assert get("dtd", tmp_path / "sets").status == "downloaded"
    assert name in {name for name, _ in hub.sent} and "1.tar" not in {name for name, _ in hub.sent}


def test_the_other_family_of_copies_is_used_where_the_first_is_missing(hub, tmp_path):
    write_task(hub.root / "clip-benchmark" / "wds_vtab-dtd", sizes=[2])
    got = get("dtd", tmp_path / "sets")
    assert got.folder == tmp_path / "sets" / TEXTURES
    assert json.loads((got.folder / "SOURCE.json").read_bytes())["repository"] == "clip-benchmark/wds_vtab-dtd"


def test_a_task_without_a_copy_on_the_hub_is_told_and_the_others_are_got(hub, tmp_path, capsys):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[2])
    assert main(["data", "get", "dtd", "mnist", "winogavil", "--to", str(tmp_path / "sets"), "--yes", "--json"]) == 1
    got = {one["task"]: one for one in json.loads(capsys.readouterr().out)}
    assert got["vtab/dtd"]["status"] == "downloaded" and got["misc/winogavil"]["folder"] is None
    assert f"put it, or a link to it, at {tmp_path / 'sets'}" in got["misc/winogavil"]["status"]
    assert "clip-benchmark/wds_mnist: not on the hub, or not for everyone" in got["mnist"]["status"]


def test_nothing_is_downloaded_unasked(hub, tmp_path, capsys, monkeypatch):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[2])
    with open(os.devnull) as nobody:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdin", nobody)
        assert main(["data", "get", "dtd", "--to", str(tmp_path / "sets")]) == 2
    err = capsys.readouterr().err
    assert "Describable Textures: 10.3 kB" in err and "needs a yes, and this is no terminal; give --yes" in err
    assert hub.sent == [] and not (tmp_path / "sets").exists()


def test_a_copy_that_does_not_fit_on_the_disk_is_refused_before(hub, tmp_path, monkeypatch):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[2])
    monkeypatch.setattr(evaluation_sets.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 9000}))
    with pytest.raises(UserError, match=r"10\.3 kB are needed and 9 kB are free"):
        get("dtd", tmp_path / "sets")
    assert hub.sent == []


@pytest.mark.slow
def test_the_command_reaches_the_hub_that_the_environment_names(hub, tmp_path):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[2])
    command = [sys.executable, "-m", "neuclip", "data", "get", "dtd", "--to", str(tmp_path / "sets"), "--yes"]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert ended.stdout == f"{tmp_path / 'sets' / TEXTURES}\n"


# What is on the disk already is read as it is; nothing is downloaded or copied.


def write_captions(folder):
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.png").write_bytes(image_bytes(number))
    rows = ["image,caption", "0.png,one", "0.png,eins", "2.png,three", "1.png,two", "1.png,zwei"]
    (folder / "captions.csv").write_text("\n".join(rows) + "\n")


def write_karpathy(folder):
    (folder / "images").mkdir(parents=True)
    entries = []
    for number, split in enumerate(["test", "train", "test"]):
        (folder / "images" / f"{number}.jpg").write_bytes(image_bytes(number, "jpg"))
        sentences = [{"raw": f"photo {number} {k}"} for k in range(5)]
        entries.append({"filename": f"{number}.jpg", "split": split, "sentences": sentences})
    (folder / "dataset_flickr30k.json").write_text(json.dumps({"images": entries, "dataset": "flickr30k"}))


def write_puzzles(folder):
    write_puzzle_images(folder)
    write_puzzle_table(folder / "winogavil_dataset.csv", PUZZLES, repr)


def write_photos(folder):
    write_class_folders(folder, cat=3, sea_horse=4)


def write_shards(folder):
    write_task(folder, sizes=[5, 2], with_metadata=True)


@pytest.mark.parametrize(
    ("task", "write", "counts", "note"),
    [
        ("dtd", write_photos, {"images": 7, "classes": 2}, "prompts are the default ones"),
        ("fmow", write_shards, {"images": 7, "classes": 6}, "7 images, the task has 22,108"),
        ("geode", write_photos, {"images": 7, "classes": 2}, "0 numbers per image in npy members, the task has region"),
        ("flickr", write_captions, {"images": 3, "captions": 5}, "3 images, the task has 1,000"),
        ("flickr", write_karpathy, {"images": 2, "captions": 10}, "2 images, the task has 1,000"),
        ("winogavil", write_puzzles, {"images": 6, "puzzles": 2}, "2 puzzles, the task has 3,563"),
    ],
)
def test_a_set_that_is_there_is_checked_and_used_as_it_is_by_a_link_too(task, write, counts, note, tmp_path):
    write(tmp_path / "mine")
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / choose_tasks(task)[0].folder).symlink_to(tmp_path / "mine")
    got = get(task, tmp_path / "sets")
    assert (got.status, got.counts) == ("there", counts)
    assert note in "; ".join(got.notes)


def test_a_broken_set_is_never_replaced_but_told(tmp_path):
    folder = write_task(tmp_path / TEXTURES, sizes=[2])
    (folder / "test" / "0.tar").unlink()
    with pytest.raises(UserError, match=rf"0\.tar: missing.* remove {folder} to get it again"):
        get("dtd", tmp_path)


def test_the_list_shows_all_tasks_and_which_are_there(tmp_path, capsys):
    write_task(tmp_path / TEXTURES, sizes=[1])
    assert main(["data", "get", "--list", "--to", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 38 and f"1 of 38 in {tmp_path}" in err
    assert next(line for line in out.splitlines() if "there" in line).startswith("Describable Textures")
    assert max(map(len, out.splitlines())) <= 120
    assert main(["data", "get", "imagenet", "--list", "--to", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == 7 and listed[0]["size"] == 50_000 and listed[0]["folder"] is None


def test_an_unknown_task_none_and_a_dropped_flag_are_one_line(capsys, cache):
    assert main(["data", "get", "imagenet-v2"]) == 2 and "did you mean imagenetv2?" in capsys.readouterr().err
    assert main(["data", "get"]) == 2 and "give datacomp for all" in capsys.readouterr().err
    assert main(["data", "get", "dtd", "--from", "here"]) == 2 and "no flag --from" in capsys.readouterr().err
    assert default_root() == cache / "evaluation-sets"
