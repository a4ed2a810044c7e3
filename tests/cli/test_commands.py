"""Each command parses its own examples, and passes on what the user gave."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from neuclip.cli.data import ACTIONS
from neuclip.cli.doctor import parse_arguments as parse_doctor
from neuclip.cli.main import COMMANDS, main
from neuclip.cli.runs import find_run
from neuclip.cli.tables import aligned, figures_table, nested_table
from neuclip.cli.train import parse_arguments as parse_train
from neuclip.errors import UserError
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import settings_as_yaml
from tests.builders.images import write_csv, write_shards

EXAMPLES = [example for command in COMMANDS for example in import_module(f"neuclip.cli.{command}").COMMAND.examples]
EXAMPLES += [example for command, _ in ACTIONS.values() for example in command.examples]


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A run as far as the command line looks: a folder with its settings."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/first")
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(settings_as_yaml(read_settings(None, ["--run.seed", "7"])))
    return folder


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_every_help_can_be_parsed(example):
    program, command, *arguments = shlex.split(example)
    assert program == "neuclip"
    if command == "train":
        settings, resume, _ = parse_train(arguments)
        assert settings != read_settings() and resume is None
    elif command == "doctor":
        settings, _ = parse_doctor(arguments)
        assert settings.data.train == arguments[0]
    elif command == "data":
        action, *rest = arguments
        ACTIONS[action][0].parse(rest)
    else:
        operands, _ = import_module(f"neuclip.cli.{command}").COMMAND.parse(arguments)
        assert operands


def test_train_finds_the_recipe_between_its_flags():
    settings, resume, as_json = parse_train(["--json", "tiny", "--run.seed", "3", "--log.wandb"])
    assert (settings.model.name, settings.run.seed, settings.log.wandb) == ("tiny", 3, True)
    assert (resume, as_json) == (None, True)


def test_resume_takes_the_runs_own_settings_then_the_flags(run_folder):
    settings, resume, _ = parse_train(["--resume", str(run_folder), "--data.workers", "0"])
    assert (settings.run.seed, settings.data.workers, resume) == (7, 0, run_folder)


def test_a_missing_run_is_answered_with_the_nearest(run_folder):
    with pytest.raises(UserError, match=r"no run at runs/frist; did you mean runs/first\?"):
        find_run("runs/frist")
    with pytest.raises(UserError, match=r"did you mean runs/first\?"):
        find_run("first")  # the default folder is searched as well
    with pytest.raises(UserError, match="runs holds first"):
        find_run("runs/zzz")
    with pytest.raises(UserError, match="runs is not a run: it has no settings"):
        find_run("runs")


def test_eval_of_a_runs_bare_name_is_answered_with_its_path(run_folder, capsys):
    assert main(["eval", "first"]) == 2
    assert "did you mean runs/first?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval runs/first --batch-size 0", "error runs/first --anchors 0"])
def test_numbers_below_one_are_refused_before_anything_is_loaded(run_folder, capsys, command):
    assert main(command.split()) == 2
    assert "is 0; give 1 or more" in capsys.readouterr().err


def test_a_bad_flag_beside_resume_is_blamed_on_the_flag(run_folder, capsys):
    assert main(["train", "--resume", str(run_folder), "--checkpoint.keep", "0"]) == 2
    assert capsys.readouterr().err.startswith("neuclip: --checkpoint.keep is 0; give 1 or more")


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


def test_skipped_images_are_a_row_where_there_are_any():
    rows = [line.split() for line in figures_table({"a.images": 3, "a.skipped": 0, "b.skipped": 2}).splitlines()]
    assert rows == [["a"], ["images", "3"], ["b"], ["skipped", "2"]]


def test_errors_are_rows_of_estimators_and_numbers_that_stand_alone():
    table = nested_table(
        {"neuclip": {"image": 0.5, "text": 0.25}, "batch": {"image": 1.0, "text": 2.0}, "anchors": 10_000}
    )
    lines = [line.split() for line in table.splitlines()]
    assert lines == [["image", "text"], ["neuclip", "0.5", "0.25"], ["batch", "1", "2"], [], ["anchors", "10,000"]]


def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "file"))
    pytest.importorskip("resvg_py", reason="needs pip install 'neuclip[demo]'")
    assert main(["data", "index", "icons-30k"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "NEUCLIP_CACHE" in error


@pytest.mark.parametrize("name", ["photos", "pairs.csv"])
def test_data_given_as_a_recipe_is_answered_with_its_flag(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "pairs.csv").write_text("image,caption\n")
    assert main(["train", name]) == 2
    assert f"--data.train {name}" in capsys.readouterr().err


@pytest.mark.parametrize("action", ACTIONS)
def test_the_help_of_an_action_is_of_that_action_alone(action, capsys):
    assert main(["data", "--help"]) == 0
    everything = capsys.readouterr().out
    assert main(["data", action, "--help"]) == 0
    alone = capsys.readouterr().out
    command = ACTIONS[action][0]
    assert alone.startswith(f"usage: neuclip data {action}") and f"example:\n  neuclip data {action}" in alone
    for text in (command.usage, command.about, command.flags_help()):
        assert text in alone and text in everything
    for other in ACTIONS.keys() - {action}:
        assert f"data {other}" not in alone and ACTIONS[other][0].about not in alone


def test_an_unknown_switch_is_blamed_and_not_the_argument_that_it_took(capsys):
    assert main(["data", "index", "--jso", "shards"]) == 2 and main(["doctor", "--jsno", "shards"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "did you mean --json?" in first and "did you mean --json?" in second


def test_convert_prints_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table = write_csv(Path("table"), 5)
    (table.parent / "000002.png").unlink()
    assert main(["data", "convert", str(table), "shards", "--shard-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
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
    assert main(["data", "index", "one:2,two", "--data.caption_key", "nope", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [source["name"] for source in printed["sources"]] == ["one", "two"]
    first = printed["sources"][0]
    assert (first["samples"], first["shards"], first["without_caption"], first["faults"]) == (5, 2, 5, {})


def test_index_prints_json_and_verify_says_what_to_do_instead(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path / "shards", 4)
    assert main(["data", "index", "shards", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["sources"]
    assert (found["name"], found["samples"], found["without_caption"], found["faults"]) == ("shards", 4, 0, {})
    assert main(["data", "index", "shards", "--verify"]) == 2
    assert "delete its .index.npz" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["data convert {} shards", "data index {}", "doctor {}", "train --data.train {} --run.folder runs"]
)
@pytest.mark.parametrize(
    ("typed", "meant"),
    [("pairs.cvs", "pairs.csv"), ("phtos/pears.tar", "photos/pears.tar")],
)
def test_a_mistyped_address_is_answered_with_what_lies_there(command, typed, meant, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    Path("photos/pears.tar").touch()
    Path("pairs.csv").touch()
    assert main(command.format(typed).split()) == 2
    assert capsys.readouterr().err.endswith(f"did you mean {meant}?\n")
