from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from neuclip.cli.main import main
from neuclip.data.task_sets import ZeroShotTask
from neuclip.datasets.evaluation_sets import get
from neuclip.errors import RunFailed, UserError
from neuclip.tasks import choose_tasks
from tests.builders.data import write_task
from tests.builders.server import REVISION

TEXTURES = "wds_vtab-dtd_test"


def agree(*_):
    pass


def test_a_copy_of_the_hub_is_downloaded_without_its_training_part(hub, tmp_path, capsys):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[5, 3])
    write_task(hub.root / "djghosh" / TEXTURES / "train", sizes=[4])
    assert main(["data", "get", "dtd", "--to", str(tmp_path / "sets"), "--yes"]) == 0
    out, err = capsys.readouterr()
    folder = tmp_path / "sets" / TEXTURES
    assert out.splitlines() == [str(folder)]
    assert "djghosh/wds_vtab-dtd_test" in err and "warning: 8 images, the task has 1,880" in err
    assert len(ZeroShotTask.open(folder).source) == 8
    assert sorted(path.name for path in folder.iterdir()) == [
        "SOURCE.json",
        "classnames.txt",
        "test",
        "zeroshot_classification_templates.txt",
    ]
    origin = json.loads((folder / "SOURCE.json").read_bytes())
    assert origin["from"] == {"repository": f"djghosh/{TEXTURES}", "revision": REVISION}
    assert origin["files"]["test/1.tar"]["bytes"] == (folder / "test" / "1.tar").stat().st_size


def test_after_a_break_only_what_is_missing_is_downloaded(hub, tmp_path):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[5, 3])
    hub.missing.add("1.tar")
    with pytest.raises(RunFailed, match=r"Describable Textures: the hub could not be read"):
        get.get_from_hub(choose_tasks("dtd"), tmp_path / "sets", agree)
    assert not (tmp_path / "sets" / TEXTURES).exists()
    hub.missing.clear()
    hub.sent.clear()
    assert get.get_from_hub(choose_tasks("dtd"), tmp_path / "sets", agree)[0].how == "downloaded"
    assert {name for name, _ in hub.sent} == {"1.tar", "nshards.txt", "zeroshot_classification_templates.txt"}
    hub.sent.clear()
    assert get.get_from_hub(choose_tasks("dtd"), tmp_path / "sets", agree)[0].how == "there"
    assert hub.sent == []


@pytest.mark.parametrize("name", ["0.tar", "classnames.txt"])
def test_a_file_with_another_hash_is_refused_and_deleted(hub, tmp_path, name):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[5])
    true = next((hub.root / "djghosh" / TEXTURES).rglob(name)).read_bytes()
    hub.lies[name] = true[:-1] + b"?"
    with pytest.raises(RunFailed, match=f"{name} has not the size and hash that the hub states"):
        get.get_from_hub(choose_tasks("dtd"), tmp_path / "sets", agree)
    assert not list((tmp_path / "sets").glob(f".*/**/{name}"))
    hub.lies.clear()
    assert get.get_from_hub(choose_tasks("dtd"), tmp_path / "sets", agree)[0].how == "downloaded"


def test_the_other_family_of_copies_is_used_where_the_first_is_missing(hub, tmp_path):
    write_task(hub.root / "clip-benchmark" / "wds_vtab-dtd", sizes=[2])
    (got,) = get.get_from_hub(choose_tasks("dtd"), tmp_path / "sets", agree)
    assert got.folder == tmp_path / "sets" / TEXTURES
    assert json.loads((got.folder / "SOURCE.json").read_bytes())["from"]["repository"] == "clip-benchmark/wds_vtab-dtd"


def test_a_task_without_a_copy_on_the_hub_is_told_and_the_others_are_got(hub, tmp_path, capsys):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[2])
    assert main(["data", "get", "dtd", "mnist", "winogavil", "--to", str(tmp_path / "sets"), "--yes", "--json"]) == 1
    digits, textures, puzzles = sorted(json.loads(capsys.readouterr().out), key=lambda one: one["task"] != "mnist")
    assert (textures["how"], puzzles["folder"]) == ("downloaded", None) and "--from" in puzzles["how"]
    assert "clip-benchmark/wds_mnist: not on the hub, or not for everyone" in digits["how"]


def test_nothing_is_downloaded_unasked(hub, tmp_path, capsys, monkeypatch):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[2])
    with open(os.devnull) as nobody:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdin", nobody)
        assert main(["data", "get", "dtd", "--to", str(tmp_path / "sets")]) == 2
    err = capsys.readouterr().err
    assert "Describable Textures: 10.3 kB" in err and "give --yes" in err
    assert hub.sent == []


def test_a_copy_that_does_not_fit_on_the_disk_is_refused_before(hub, tmp_path, monkeypatch):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[2])
    monkeypatch.setattr(get.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 9000}))
    with pytest.raises(UserError, match=r"10\.3 kB are needed and 9 kB are free"):
        get.get_from_hub(choose_tasks("dtd"), tmp_path / "sets", agree)
    assert hub.sent == []


@pytest.mark.slow
def test_the_command_reaches_the_hub_that_the_environment_names(hub, tmp_path):
    write_task(hub.root / "djghosh" / TEXTURES, sizes=[2])
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "neuclip", "data", "get", "dtd", "--to", str(tmp_path / "sets"), "--yes"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "sets" / TEXTURES)), done.stderr


def test_without_a_network_one_line_says_what_to_do(tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["data", "get", "dtd", "--to", str(tmp_path), "--yes"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "fetch djghosh/wds_vtab-dtd_test" in err and "--from" in err
