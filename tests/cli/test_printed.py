"""What commands print: recipes, figures, and JSON for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from neuclip import api
from neuclip.cli.main import main
from neuclip.settings.paper import paper_yaml
from neuclip.settings.reading import read_settings
from tests.builders.images import write_csv, write_shards
from tests.builders.runs import settings_for


def printed(capsys, command: str) -> str:
    assert main(command.split()) == 0
    return capsys.readouterr().out


# --- recipe ----------------------------------------------------------------------------------------------------------


def test_recipes_are_listed_with_their_steps_and_objectives(capsys):
    out = printed(capsys, "recipe")
    assert "cc3m       2.7M      RN50  1,024     100M   97,656" in out
    assert all(f"\n{name} " in out for name in ("cc12m", "dfn-14m", "dfn-192m", "dfn-1b"))
    assert all(f"\n{name} " in out for name in ("clip", "siglip", "fastclip", "amorlip", "neuclip"))


def test_a_recipe_is_neuclips_by_default_and_may_be_named_as_in_the_paper(capsys):
    assert printed(capsys, "recipe CC12M") == printed(capsys, "recipe cc12m neuclip") == paper_yaml("cc12m", "neuclip")


def test_train_reads_the_printed_recipe_and_flags_override_it(capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(printed(capsys, "recipe cc3m SigLIP"))
    settings = read_settings(file, ["--data.train", "shards", "--train.batch_size", "64"])
    assert (settings.data.train, settings.train.batch_size) == ("shards", 64)
    assert settings.model.bias_initial == -10 and settings.temperature.initial == 0.1


def test_a_recipe_as_json_holds_all_settings_of_the_run(capsys):
    settings = json.loads(printed(capsys, "recipe cc3m fastclip --json"))
    assert settings["objective"]["name"] == "fastclip" and settings["objective"]["rho"] == 6.5
    assert settings["train"]["samples"] == 100_000_000 and settings["log"]["every"] == 50
    assert json.loads(printed(capsys, "recipe --json"))["settings"][0] == "cc3m"


# --- data ------------------------------------------------------------------------------------------------------------


def test_convert_prints_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table = write_csv(Path("table"), 5)
    (table.parent / "000002.png").unlink()
    assert json.loads(printed(capsys, f"data convert {table} shards --shard-size 2 --json")) == {
        "folder": "shards",
        "samples": 4,
        "shards": 3,
        "left_out": {"image file cannot be read": 1},
        "left_out_list": "shards/skipped.jsonl",
    }


def test_index_prints_json_for_each_source(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write_shards(Path(name), 5)
    sources = json.loads(printed(capsys, "data index one:2,two --data.caption_key nope --json"))["sources"]
    assert [source["name"] for source in sources] == ["one", "two"]
    first = sources[0]
    assert (first["samples"], first["shards"], first["without_caption"], first["faults"]) == (5, 2, 5, {})


@pytest.mark.parametrize(
    "command", ["data convert {} shards", "data index {}", "train --data.train {} --run.folder runs"]
)
def test_a_mistyped_data_path_is_answered_with_the_nearest_existing_one(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    Path("photos/pears.tar").touch()
    Path("pairs.csv").touch()
    for typed, meant in (("pairs.cvs", "pairs.csv"), ("phtos/pears.tar", "photos/pears.tar")):
        assert main(command.format(typed).split()) == 2
        assert capsys.readouterr().err.endswith(f"did you mean {meant}?\n")


def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "file"))
    pytest.importorskip("resvg_py", reason="the extra demo is not installed")
    assert main(["data", "index", "icons-30k"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "NEUCLIP_CACHE" in error


# --- error -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_error_prints_a_verdict_per_run_and_a_row_per_checkpoint_of_what_its_json_says(tmp_path, monkeypatch, capsys):
    data = write_shards(tmp_path / "shards", 40)
    monkeypatch.chdir(tmp_path)
    for objective in ("neuclip", "siglip"):
        api.train(settings_for(Path("runs"), data, "--run.name", objective, "--objective", objective))
    command = "error runs/neuclip runs/siglip --anchors 20 --checkpoints 2 --eps 1e-4"
    capsys.readouterr()
    lines = printed(capsys, command).splitlines()
    assert lines[1] == "eps 1e-4 for all; 20 anchors (seed 0)"
    assert re.fullmatch(r"runs/neuclip, neuclip, batch 8: the error is .* \(trained with eps 1e-6\)", lines[3])
    assert lines[4].startswith("runs/siglip, siglip, batch 8: SigLIP has no normalizer")
    assert lines[6].split() == ["run", "samples", "tau", "image", "text", "error", "of", "a", "batch", "at", "floor"]
    rows = []
    for run in json.loads(printed(capsys, f"{command} --json"))["runs"]:
        for found in run["checkpoints"]:
            method, batch = (found["estimators"].get(name, {}) for name in ("method", "minibatch"))
            figures = [found["temperature"], *(method.get(key) for key in ("image", "text", "mean")), batch["mean"]]
            rows.append([run["run"], str(found["samples"]), *figures])
    assert len(rows) == 4
    for line, row in zip(lines[7:], rows, strict=False):
        shown = line.split()
        assert shown[:2] == row[:2] and shown[-1] == "%"
        assert [None if one == "–" else pytest.approx(float(one), rel=6e-3) for one in shown[2:7]] == row[2:]
