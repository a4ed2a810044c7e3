"""What commands print: recipes, figures, and JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuclip.cli.eval import error_text
from neuclip.cli.main import main
from neuclip.settings.paper import paper_yaml
from neuclip.settings.reading import read_settings
from tests.builders.images import write_csv, write_shards


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
def test_a_mistyped_address_is_answered_with_what_lies_there(command, tmp_path, monkeypatch, capsys):
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


# --- figures ---------------------------------------------------------------------------------------------------------


def test_errors_are_a_verdict_per_run_and_a_row_per_checkpoint():
    def checkpoint(samples: int, method: float) -> dict:
        estimators = {"method": {"mean": method, "image": 0.002, "text": 0.0042}, "minibatch": {"mean": 0.031}}
        return {"samples": samples, "temperature": 0.07, "share_at_floor": 0.0, "estimators": estimators}

    run = {"run": "runs/a", "objective": "neuclip", "batch_size": 1024, "own_eps": 1e-6}
    run |= {"mean": {"method": 0.0031, "minibatch": 0.031}, "checkpoints": [checkpoint(32, 0.0031)]}
    other = run | {"run": "runs/b", "objective": "siglip", "own_eps": 1e-4, "mean": {"minibatch": 0.031}}
    without = {"method_note": "siglip has no normalizer", "estimators": {"minibatch": {"mean": 0.031}}}
    other |= {"checkpoints": [checkpoint(32, 0) | without]}
    lines = error_text({"eps": 1e-4, "anchors": 20, "seed": 0, "runs": [run, other]}).splitlines()
    assert lines[1] == "eps 1e-4 for all; 20 anchors (seed 0)"
    assert lines[3:5] == [
        "runs/a, neuclip, batch 1,024: the error is 10x smaller than a mini-batch's (trained with eps 1e-6)",
        "runs/b, siglip, batch 1,024: siglip has no normalizer",
    ]
    assert lines[6].split() == ["run", "samples", "tau", "image", "text", "error", "of", "a", "batch", "at", "floor"]
    assert lines[7].split() == ["runs/a", "32", "0.07", "0.002", "0.0042", "0.0031", "0.031", "0", "%"]
    assert lines[8].split() == ["runs/b", "32", "0.07", "–", "–", "–", "0.031", "0", "%"]
