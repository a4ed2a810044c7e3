"""`neuclip search` in the terminal."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

import pytest

from neuclip.cli.main import main
from neuclip.models.build import build_model
from neuclip.models.export import export_model
from tests.builders.images import caption, image_bytes
from tests.builders.processes import start


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    export_model(build_model("tiny"), folder)
    return f"local-dir:{folder}"


@pytest.fixture
def photos(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for number in range(6):
        Path("photos", f"{caption(number)}.png").write_bytes(image_bytes(number))
    return Path("photos")


def test_paths_and_scores_are_printed_best_first(model, photos, capsys):
    assert main(["search", model, "photos"]) == 0
    assert capsys.readouterr().out.startswith("6 images embedded; now search: neuclip search ")
    assert main(["search", model, "photos", "a red circle", "--top", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    scores = [float(line.split()[0]) for line in lines]
    assert len(lines) == 4 and scores == sorted(scores, reverse=True)
    assert all(Path(line.split(maxsplit=1)[1]).is_file() for line in lines)


def test_the_path_of_an_image_is_an_image_query(model, photos, capsys):
    Path("photos/bad.png").write_bytes(b"no image")
    assert main(["search", model, "photos", "photos/a blue circle.png", "--json", "--with", model]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["query"] == "photos/a blue circle.png" and len(found["models"]) == 2
    first = found["models"][0]
    assert first["matches"][0]["path"] == "photos/a blue circle.png" and first["matches"][0]["score"] > 0.999
    assert first["images"] == 6 and first["skipped"] == [{"path": "photos/bad.png", "reason": "image does not decode"}]
    assert printed.err == "1 image could not be used (1 x image does not decode): photos/bad.png\n"
    assert main(["search", model, "photos", "--json"]) == 0  # without a query: what is embedded
    found = json.loads(capsys.readouterr().out)
    assert found["query"] == "" and found["models"][0]["images"] == 6 and found["models"][0]["matches"] == []


MISTAKES = {
    ("nowhere", "x"): "nowhere does not exist; give a folder of images",
    ("empty", "x"): "empty and its subfolders contain no images",
    ("photos", "x", "--top", "0"): "--top is 0; give 1 or more",
    ("photos", "y.png"): "y.png does not exist; give the path of an image file, or words",
    ("photos", "words.png"): "words.png: image does not decode",
    ("photos", "x", "--page"): "--page has its own search box",
    ("photos", " "): "the query is empty",
    ("photos", ""): "the query is empty",
    ("bad", "x"): "no image in bad can be searched: 1 image could not be used (1 x image does not decode): bad/a.png",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_one_line(model, photos, capsys, arguments):
    for folder in ("empty", "bad"):
        Path(folder).mkdir()
    for file in ("words.png", "bad/a.png"):
        Path(file).write_text("words")
    assert main(["search", model, *arguments]) == 2
    printed = capsys.readouterr()
    assert MISTAKES[arguments] in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_names_that_are_no_utf8_are_printed_and_one_model_beside_itself_is_shown_twice(model, photos, monkeypatch):
    Path("photos", os.fsdecode(b"caf\xe9.png")).write_bytes(image_bytes(7))
    terminal = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["search", model, "photos", os.fsdecode(b"caf\xe9"), "--with", model]) == 0
    terminal.flush()
    printed = terminal.buffer.getvalue().decode()
    assert printed.count("  photos/caf\\udce9.png\n") == printed.count(f"{model}\n") == 2


@pytest.mark.slow
def test_the_page_runs_until_it_is_interrupted(model, photos):
    child = start(main, ["search", model, "photos", "--page"])
    address = child.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:") and len(address.split("/")[3]) >= 32
    with urllib.request.urlopen(address, timeout=60) as page:
        assert b"<title>Search photos</title>" in page.read()
    child.signal(signal.SIGINT)
    ended = child.wait()
    assert ended.code == 130 and "Traceback" not in ended.errors
