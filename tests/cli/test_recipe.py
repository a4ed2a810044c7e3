"""`neuclip recipe`: the list, one run as YAML or JSON, and the answer to a wrong name."""

from __future__ import annotations

import json

import pytest

from neuclip.cli.main import main
from neuclip.settings.paper import paper_yaml
from neuclip.settings.reading import read_settings


def printed(capsys, *arguments: str) -> str:
    assert main(["recipe", *arguments]) == 0
    return capsys.readouterr().out


def test_without_names_it_lists_settings_with_their_steps_and_objectives(capsys):
    out = printed(capsys)
    assert "cc3m       2.7M      RN50  1,024     100M   97,656" in out
    assert all(f"\n{name} " in out for name in ("cc12m", "dfn-14m", "dfn-192m", "dfn-1b"))
    assert all(f"\n{name} " in out for name in ("clip", "siglip", "fastclip", "amorlip", "neuclip"))


def test_a_setting_alone_means_neuclip(capsys):
    assert printed(capsys, "cc12m") == printed(capsys, "cc12m", "neuclip") == paper_yaml("cc12m", "neuclip")


def test_names_may_be_written_as_in_the_paper(capsys):
    assert printed(capsys, "DFN-14M", "FastCLIP") == printed(capsys, "dfn-14m", "fastclip")


def test_train_reads_the_printed_recipe_and_flags_override_it(capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(printed(capsys, "cc3m", "siglip"))
    settings = read_settings(file, ["--data.train", "shards", "--train.batch_size", "64"])
    assert (settings.data.train, settings.train.batch_size) == ("shards", 64)
    assert settings.model.bias_initial == -10 and settings.temperature.initial == 0.1


def test_json_holds_all_settings_of_the_run(capsys):
    printed_settings = json.loads(printed(capsys, "cc3m", "fastclip", "--json"))
    assert printed_settings["objective"]["name"] == "fastclip" and printed_settings["objective"]["rho"] == 6.5
    assert printed_settings["train"]["samples"] == 100_000_000
    assert printed_settings["log"]["every"] == 50
    assert json.loads(printed(capsys, "--json"))["settings"][0] == "cc3m"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("cc3", "no setting 'cc3' in the paper; did you mean cc3m?"),
        ("imagenet", "choose cc3m, cc12m, dfn-14m, dfn-192m or dfn-1b"),
        ("cc3m neuclp", "no objective 'neuclp' in the paper; did you mean neuclip?"),
        ("neuclip cc3m", "neuclip is an objective; name the setting first"),
        ("cc3m clip more", "unexpected 'more'"),
        ("cc3m --yaml", "the flags are --json"),
    ],
)
def test_a_wrong_name_is_one_line_with_the_nearest_right_one(arguments, message, capsys):
    assert main(["recipe", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
