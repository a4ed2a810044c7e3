"""Each command understands its own examples, and hands over what was asked."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from neuclip.cli.doctor import asked_examination
from neuclip.cli.main import COMMANDS, main
from neuclip.cli.runs import find_run
from neuclip.cli.tables import aligned, figures_table, nested_table
from neuclip.cli.train import asked_run
from neuclip.data.named.builtin import builtin_names, prepared_folder
from neuclip.data.named.catalogue import catalogue
from neuclip.errors import AskedWrongly
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import write_settings

EXAMPLES = [example for command in COMMANDS for example in import_module(f"neuclip.cli.{command}").COMMAND.examples]


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A run as far as the command line looks: a folder with its settings."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/first")
    folder.mkdir(parents=True)
    write_settings(read_settings(None, ["--run.seed", "7"]), folder / "settings.yaml")
    return folder


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_every_help_can_be_parsed(example):
    program, command, *arguments = shlex.split(example)
    assert program == "neuclip"
    if command == "train":
        settings, resume, _ = asked_run(arguments)
        assert settings != read_settings() and resume is None
    elif command == "doctor":
        settings, _ = asked_examination(arguments)
        assert settings.data.train == arguments[0]
    else:
        operands, _ = import_module(f"neuclip.cli.{command}").COMMAND.parse(arguments)
        assert operands


def test_train_finds_the_recipe_between_its_flags():
    settings, resume, as_json = asked_run(["--json", "tiny", "--run.seed", "3", "--log.wandb"])
    assert (settings.model.name, settings.run.seed, settings.log.wandb) == ("tiny", 3, True)
    assert (resume, as_json) == (None, True)


def test_resume_takes_the_runs_own_settings_then_the_flags(run_folder):
    settings, resume, _ = asked_run(["--resume", str(run_folder), "--data.workers", "0"])
    assert (settings.run.seed, settings.data.workers, resume) == (7, 0, run_folder)


def test_a_run_that_does_not_exist_is_answered_with_the_nearest(run_folder):
    with pytest.raises(AskedWrongly, match=r"no run at runs/frist; did you mean runs/first\?"):
        find_run("runs/frist")
    with pytest.raises(AskedWrongly, match=r"did you mean runs/first\?"):
        find_run("first")  # the usual folder is looked into as well
    with pytest.raises(AskedWrongly, match="runs holds first"):
        find_run("runs/zzz")
    with pytest.raises(AskedWrongly, match="runs is not a run: it has no settings"):
        find_run("runs")


def test_eval_of_a_runs_bare_name_is_answered_with_its_path(run_folder, capsys):
    assert main(["eval", "first"]) == 2
    assert "did you mean runs/first?" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["eval runs/first --batch-size 0", "error runs/first --anchors 0"])
def test_numbers_below_one_are_refused_before_anything_is_loaded(run_folder, capsys, asked):
    assert main(asked.split()) == 2
    assert "is 0; give 1 or more" in capsys.readouterr().err


def test_a_bad_flag_beside_resume_is_blamed_on_the_flag(run_folder, capsys):
    assert main(["train", "--resume", str(run_folder), "--checkpoint.keep", "0"]) == 2
    assert capsys.readouterr().err.startswith("neuclip: --checkpoint.keep is 0; give 1 or more")


def test_data_list_tells_what_is_prepared_within_100_columns(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path))
    prepared_folder(catalogue()["digits"]).mkdir()
    assert main(["data", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 100
    first_lines = {line.split()[0]: line for line in lines if not line.startswith(" ")}
    assert list(first_lines) == ["name", *builtin_names()]
    assert [name for name, line in first_lines.items() if line.endswith(" yes")] == ["digits"]


def test_data_list_for_programs_holds_every_set(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path))
    assert main(["data", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == builtin_names()
    assert not any(entry["prepared"] for entry in listed)
    assert all(Path(entry["folder"]).parent == tmp_path for entry in listed)


def test_an_unknown_data_set_is_answered_with_the_nearest(capsys):
    assert main(["data", "prepare", "icons"]) == 2
    assert "did you mean icons-30k?" in capsys.readouterr().err


def test_columns_line_up():
    assert aligned([["a", "1"], ["long", "22", "x"]]) == "a      1\nlong  22  x\n"


def test_figures_stand_beside_their_chance_as_percent():
    table = figures_table(
        {
            "icons-30k/new-drawings.image_to_text_recall_at_1": 0.123,
            "icons-30k/new-drawings.image_to_text_chance_at_1": 0.001,
            "icons-30k/new-drawings.images": 1000,
            "b/zero.v1.top1": 0.5,
            "b/zero.v1.chance": 0.1,
        }
    )
    lines = table.splitlines()
    assert lines[0] == "icons-30k/new-drawings" and lines[3] == "b/zero.v1"
    assert " ".join(lines[1].split()) == "image to text recall at 1 12.3 % chance 0.10 %"
    assert lines[2].split() == ["images", "1,000"]
    assert " ".join(lines[4].split()) == "top1 50.0 % chance 10.0 %"


def test_errors_are_rows_of_estimators_and_numbers_that_stand_alone():
    table = nested_table(
        {"neuclip": {"image": 0.5, "text": 0.25}, "batch": {"image": 1.0, "text": 2.0}, "anchors": 10_000}
    )
    lines = [line.split() for line in table.splitlines()]
    assert lines == [["image", "text"], ["neuclip", "0.5", "0.25"], ["batch", "1", "2"], [], ["anchors", "10,000"]]


def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "file"))
    assert main(["data", "prepare", "digits"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "NEUCLIP_CACHE" in error


@pytest.mark.parametrize("name", ["photos", "pairs.csv"])
def test_data_in_the_place_of_a_recipe_is_told_where_data_goes(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "pairs.csv").write_text("image,caption\n")
    assert main(["train", name]) == 2
    assert f"--data.train {name}" in capsys.readouterr().err


def test_the_help_of_data_names_every_data_set(capsys):
    assert main(["data", "prepare", "--help"]) == 0
    assert "iconify, tuxpaint" in capsys.readouterr().out


def test_the_list_of_data_sets_fits_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "84")
    assert main(["data", "list"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 84
