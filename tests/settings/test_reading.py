"""A recipe, then flags, later wins; text becomes its declared type without a change of meaning; everything else is an
error that says where and what instead."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from neuclip.errors import UserError
from neuclip.settings.reading import read_settings, shipped_recipes


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes a recipe and gives its path, relative as a user would type it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        Path("r.yaml").write_text(text, encoding="utf-8")
        return Path("r.yaml")

    return write


def complaint(recipe: Path | None, *flags: str) -> str:
    with pytest.raises(UserError) as caught:
        read_settings(recipe, flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read(key: str, value: str) -> Any:
    """What a flag becomes."""
    return attrgetter(key)(read_settings(None, [f"--{key}", value]))


# Recipes and flags


def test_without_a_recipe_the_shipped_tiny_is_read():
    assert read_settings() == read_settings(Path("tiny")) == read_settings(Path("tiny.yaml"))
    assert read_settings().model.name == "tiny"


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_can_be_read(name):
    assert read_settings(Path(name)).data.train or name in ("finetune", "locked")  # which are for data of one's own


def test_what_a_recipe_leaves_out_keeps_its_default_and_names_may_have_dashes(recipe):
    found = read_settings(recipe("train: {samples: 20k}\noptimizer: {learning-rate: 2e-3}"))
    assert (found.train.samples, found.train.batch_size, found.optimizer.learning_rate) == (20_000, 1024, 2e-3)
    assert read_settings(recipe("")) == read_settings(recipe("train:\n"))


def test_flags_override_the_recipe_and_later_flags_earlier_ones(recipe):
    path = recipe("train: {batch_size: 8}\nrun: {seed: 3}\n")
    found = read_settings(path, ["--train.batch_size", "16", "--train.batch-size=32", "--log.every", "5"])
    assert (found.train.batch_size, found.run.seed, found.log.every) == (32, 3, 5)


def test_a_bare_flag_switches_on_even_before_another_flag():
    found = read_settings(None, ["--log.tensorboard", "--run.seed", "-1", "--log.wandb", "false"])
    assert (found.log.tensorboard, found.run.seed, found.log.wandb) == (True, -1, False)


def test_the_objective_may_be_a_plain_name_or_have_fields_which_another_by_flag_drops(recipe):
    default = read_settings(None, ["--objective", "clip"]).objective
    assert read_settings(recipe("objective: clip")).objective == default
    path = recipe("objective:\n  name: neuclip\n  rho: 5\n")
    assert (read_settings(path).objective_name, read_settings(path).objective.rho) == ("neuclip", 5.0)
    for flag in ("--objective", "--objective.name"):
        found = read_settings(path, [flag, "clip"])
        assert (found.objective_name, found.objective) == ("clip", default)


# Values

VALUES = {
    "run.seed": {"128": 128, "1e6": 10**6, "2_000": 2000, "10k": 10**4, "3M": 3 * 10**6, "1.5M": 1_500_000, "-1": -1},
    "log.wandb": {"true": True, "false": False, "True": True},
    "evaluation.retrieval": {"": (), "none": (), "shards/{0,1}.tar, other": ("shards/{0,1}.tar", "other")},
    "data.crop_scale": {"0.5,1": (0.5, 1.0)},
    "objective.network_lr": {"default": None, "2": 2.0},
}
REFUSED = {
    ("run.seed", "whole number"): ["1.5", "1e-3", "012", "0x10", "abc", "", "1m", "1 000", "1e999999999"],
    ("objective.rho", "a number"): ["nan", "inf", ".inf", "1e999", "1:30", "012", "10k", "abc"],
    ("log.wandb", "true or false"): ["1", "yes", ""],
    ("data.crop_scale", "2 values separated by commas"): ["0.8", "0.8,0.9,1"],
    ("data.crop_scale", "remove the extra comma"): ["0.8,"],
    ("data.crop_scale", "a number"): ["a,b"],
    ("temperature.schedule", "(did you mean cosine?)"): ["cosin"],
}


@pytest.mark.parametrize(("key", "text"), [(key, text) for key, texts in VALUES.items() for text in texts])
def test_values_are_read_as_people_write_them(key, text):
    assert read(key, text) == VALUES[key][text]


@pytest.mark.parametrize(("key", "remedy", "text"), [(*one, text) for one, texts in REFUSED.items() for text in texts])
def test_what_is_no_such_value_is_refused(key, remedy, text):
    assert remedy in complaint(None, f"--{key}", text)


@given(strategies.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_survives_its_own_spelling(number):
    assert read("objective.rho", repr(number)) == number


def test_a_list_in_yaml_may_hold_what_a_flag_cannot_say(recipe):
    path = recipe("data: {crop_scale: [0.5, 1]}\nevaluation:\n  retrieval:\n    - none\n    - ''\n")
    found = read_settings(path, ["--evaluation.zero_shot", "c,d"])
    assert found.data.crop_scale == (0.5, 1.0) and found.evaluation.zero_shot == ("c", "d")
    assert found.evaluation.retrieval == ("none", "")


# Errors

MEANT = {
    "train.batchsize": "--train.batch_size",
    "batch_size": "--train.batch_size",
    "optim.learning_rate": "--optimizer.learning_rate",
    "optimizer.lr": "--optimizer.learning_rate",
    "train.learning_rate": "--optimizer.learning_rate or --temperature.learning_rate",
    "evaluaton.batch_size": "--evaluation.batch_size",
    "rho": "--objective.rho",
}
OF_OTHER = "objective.inner_steps belongs to objective neuclip, but the objective is clip"
FLAGS = {
    **{f"--{key} 1": f"--{key} is not a setting; did you mean {meant}" for key, meant in MEANT.items()},
    "--train.zzz 1": "train has --train.batch_size, --train.micro_batch_size, --train.samples, --train.epochs",
    "--zzz 1": "the sections are run, data",
    "--model tiny": "--model is a section; its fields are --model.name",
    "--objective clip --objective.inner_steps 5": f"--{OF_OTHER}",
    "--optimizer.learning_rate -1": "--optimizer.learning_rate is -1.0; give a number above 0",
    "--objective.num_prototypes 0": "--objective.num_prototypes is 0; give 1 or more (default 4096)",
    "--objective amorlip --objective.rho none": "--objective.rho is empty; give one number",
    "--train.batch_size 1M": "--train.batch_size: train.samples 96000 is below train.batch_size 1000000",
    "--temperature.initial 3": "--temperature.initial: temperature.minimum, initial, maximum are",
    "stray": "'stray' is not a flag",
}
LINES = {
    "train:\n  batch_sise: 8\n": "line 2: train.batch_sise is not a setting; did you mean train.batch_size?",
    "\noptim:\n  eps: 1\n": "line 2: optim is not a section; did you mean optimizer?",
    "batch_size: 8\n": "line 1: batch_size is not a setting; did you mean train.batch_size",
    "objective:\n  name: clip\n  inner_steps: 5\n": f"line 3: {OF_OTHER}",
    "train:\n  batch_size: abc\n": "line 2: train.batch_size is 'abc'; give a whole number",
    "train:\n  batch_size: true\n": "line 2: train.batch_size is true; give a whole number",
    "train:\n  batch_size: [1]\n": "line 2: train.batch_size is ['1']; give a whole number",
    "train:\n  batch_size: 012\n": "line 2: train.batch_size is '012'; give a whole number",
    "train:\n  batch_size:\n": "line 2: train.batch_size is empty",
    "log:\n  wandb:\n": "line 2: log.wandb is empty",
    "train:\n  batch_size: {a: 1}\n": "line 2: train.batch_size is a group of fields",
    "optimizer:\n  eps: 0.1\n  learning_rate: -1\n": "line 3: optimizer.learning_rate is -1.0; give",
    "run:\n  name: on\n": "line 2: run.name is true; YAML reads this word as a boolean; put it in quotes",
    "train: 5\n": "line 1: train is '5'; give its fields in the lines below",
    "objective: nuclip\n": "line 1: objective.name is 'nuclip'; did you mean neuclip?",
    "objective: [a]\n": "line 1: objective.name is ['a']; choose clip, siglip, fastclip, amorlip, neuclip, scent or ",
    "- a\n": "line 1: expected sections",
    "train:\n  samples: 9k\n  batch_size: 8\n  samples: 7k\n": "line 4: train.samples is given twice, first in line 2",
    "train: {}\nrun: {}\ntrain: {}\n": "line 3: train is given twice, first in line 1",
    "train:\n  samples: [1\n": "line 3: not valid YAML",
    "train:\n\tsamples: 1\n": "line 2: not valid YAML",
    "? [a]\n: 1\n": "line 1: expected the name of a setting",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_a_wrong_flag_is_answered_with_what_was_meant_or_what_it_takes(flags):
    assert FLAGS[flags] in complaint(None, *flags.split())


@pytest.mark.parametrize("text", LINES)
def test_a_wrong_recipe_is_answered_with_file_and_line(recipe, text):
    assert complaint(recipe(text)).startswith(f"r.yaml {LINES[text]}")


def test_a_recipe_that_is_none_is_refused(recipe, tmp_path):
    names = [f"a{depth}" for depth in range(10)]  # aliases that mean a billion values are not followed
    lines = "".join(f"  {b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in pairwise(names))
    assert "line 2: train.a0 is not a setting" in complaint(recipe(f"train:\n  a0: &a0 [x]\n{lines}"))
    assert complaint(recipe("train: " + "[" * 5000)) == "r.yaml: not valid YAML: nested too deeply"
    assert complaint(recipe("a: 1\x00\n")).startswith("r.yaml: not valid YAML")
    Path("r.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in complaint(Path("r.yaml"))
    assert complaint(Path("tinny.yaml")).endswith("did you mean tiny?")
    assert "no recipe elsewhere/tiny.yaml" in complaint(Path("elsewhere/tiny.yaml"))
    Path("settings.yaml").touch()
    assert f"--resume {tmp_path}" in complaint(tmp_path)


WORDS = strategies.sampled_from(
    ["train", "batch_size", "objective", "name", "rho", "on", "012", "1e400", ":", "\n", "  ", "-"]
)
LETTERS = strategies.sampled_from("{}[]&*!|>'\"%@,.#?~=")
TEXTS = strategies.lists(WORDS | LETTERS | strategies.text(max_size=3)).map("".join)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_any_text_as_a_recipe_gives_settings_or_a_one_line_error(recipe, text):
    try:
        read_settings(recipe(text))
    except UserError as error:
        assert str(error).startswith("r.yaml")


@settings(max_examples=200)
@given(strategies.lists(TEXTS.map("--{}".format) | TEXTS | strategies.sampled_from(["--train.samples", "--objective"])))
def test_any_text_as_flags_gives_settings_or_a_user_error(flags):
    with suppress(UserError):
        assert asdict(read_settings(None, flags))
