"""A recipe, then flags, later wins; everything else is an error that says where and what instead."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from neuclip.errors import UserError
from neuclip.settings.objectives import CLIPSettings, NeuCLIPSettings
from neuclip.settings.reading import read_settings, shipped_recipes
from neuclip.settings.sections import Settings


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


def test_without_a_recipe_the_shipped_tiny_is_read():
    assert read_settings() == read_settings(Path("tiny")) == read_settings(Path("tiny.yaml"))
    assert read_settings().model.name == "tiny"


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_can_be_read(name):
    assert read_settings(Path(name)).data.train or name in ("finetune", "locked")  # which are for data of one's own


def test_what_a_recipe_leaves_out_keeps_its_default(recipe):
    settings = read_settings(recipe("train:\n  samples: 20k\n"))
    assert (settings.train.samples, settings.train.batch_size) == (20_000, 1024)
    assert read_settings(recipe("")) == read_settings(recipe("train:\n")) == Settings()


def test_flags_override_the_recipe_and_later_flags_earlier_ones(recipe):
    path = recipe("train: {batch_size: 8}\nrun: {seed: 3}\n")
    settings = read_settings(path, ["--train.batch_size", "16", "--train.batch-size=32"])
    assert (settings.train.batch_size, settings.run.seed) == (32, 3)


def test_a_recipe_may_have_dashes_in_names_and_exponents_without_a_point(recipe):
    settings = read_settings(recipe("train: {batch-size: 8}\noptimizer: {learning_rate: 2e-3}"))
    assert (settings.train.batch_size, settings.optimizer.learning_rate) == (8, 2e-3)


def test_negative_numbers_are_values_of_flags():
    assert read_settings(None, ["--run.seed", "-1"]).run.seed == -1


def test_a_bare_flag_switches_on_even_before_another_flag():
    settings = read_settings(None, ["--log.tensorboard", "--log.every", "5", "--log.wandb", "false"])
    assert (settings.log.tensorboard, settings.log.every, settings.log.wandb) == (True, 5, False)


def test_tuples_come_from_commas_and_from_yaml_lists(recipe):
    path = recipe("data: {crop_scale: [0.5, 1]}\nevaluation:\n  retrieval:\n    - a\n    - b\n")
    settings = read_settings(path, ["--evaluation.zero_shot", "c,d"])
    assert settings.data.crop_scale == (0.5, 1.0)
    assert (settings.evaluation.retrieval, settings.evaluation.zero_shot) == (("a", "b"), ("c", "d"))


def test_the_objective_may_be_a_plain_name_or_have_fields(recipe):
    assert read_settings(recipe("objective: clip")).objective == CLIPSettings()
    settings = read_settings(recipe("objective:\n  name: neuclip\n  rho: 5\n"))
    assert (settings.objective_name, settings.objective) == ("neuclip", NeuCLIPSettings(rho=5.0))


@pytest.mark.parametrize("flag", ["--objective", "--objective.name"])
def test_another_objective_by_flag_drops_the_recipes_objective_fields(recipe, flag):
    settings = read_settings(recipe("objective: {name: neuclip, rho: 5}"), [flag, "clip"])
    assert (settings.objective_name, settings.objective) == ("clip", CLIPSettings())


def test_a_field_of_another_objective_is_named_with_its_owner(recipe):
    expected = "objective.inner_steps belongs to objective neuclip, but the objective is clip"
    assert complaint(None, "--objective", "clip", "--objective.inner_steps", "5").startswith(f"--{expected}")
    assert complaint(recipe("objective:\n  name: clip\n  inner_steps: 5\n")).startswith(f"r.yaml line 3: {expected}")


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--train.batchsize", "--train.batch_size"),
        ("--batch_size", "--train.batch_size"),
        ("--optim.learning_rate", "--optimizer.learning_rate"),
        ("--optimizer.lr", "--optimizer.learning_rate"),
        ("--train.learning_rate", "--optimizer.learning_rate or --temperature.learning_rate"),
        ("--evaluaton.batch_size", "--evaluation.batch_size"),
        ("--rho", "--objective.rho"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_one_meant(flag, meant):
    assert f"{flag} is not a setting; did you mean {meant}" in complaint(None, flag, "1")


def test_siblings_are_listed_when_nothing_is_near():
    fields = "--train.batch_size, --train.micro_batch_size, --train.samples, --train.epochs"
    assert f"train has {fields}" in complaint(None, "--train.zzz", "1")
    assert "the sections are run, data" in complaint(None, "--zzz", "1")
    assert "--model is a section; its fields are --model.name" in complaint(None, "--model", "tiny")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "train:\n  batch_sise: 8\n",
            "r.yaml line 2: train.batch_sise is not a setting; did you mean train.batch_size?",
        ),
        ("\noptim:\n  eps: 1\n", "r.yaml line 2: optim is not a section; did you mean optimizer?"),
        ("batch_size: 8\n", "r.yaml line 1: batch_size is not a setting; did you mean train.batch_size"),
        ("train:\n  batch_size: abc\n", "r.yaml line 2: train.batch_size is 'abc'; give a whole number"),
        ("train:\n  batch_size: true\n", "r.yaml line 2: train.batch_size is true; give a whole number"),
        ("train:\n  batch_size: 012\n", "r.yaml line 2: train.batch_size is '012'; give a whole number"),
        ("train:\n  batch_size:\n", "r.yaml line 2: train.batch_size is empty"),
        ("train:\n  batch_size: {a: 1}\n", "r.yaml line 2: train.batch_size is a group of fields"),
        ("run:\n  name: on\n", "r.yaml line 2: run.name is true; YAML reads this word as a boolean"),
        ("train: 5\n", "r.yaml line 1: train is '5'; give its fields in the lines below"),
        ("objective: nuclip\n", "r.yaml line 1: objective.name is 'nuclip'; did you mean neuclip?"),
        (
            "objective: [a]\n",
            "r.yaml line 1: objective.name is ['a']; choose clip, siglip, fastclip, amorlip, neuclip or scent",
        ),
        ("- a\n", "r.yaml line 1: expected sections"),
        (
            "train:\n  samples: 9k\n  batch_size: 8\n  samples: 7k\n",
            "line 4: train.samples is given twice, first in line 2",
        ),
        ("train: {}\nrun: {}\ntrain: {}\n", "r.yaml line 3: train is given twice, first in line 1"),
        ("train:\n  samples: [1\n", "r.yaml line 3: not valid YAML"),
        ("train:\n\tsamples: 1\n", "r.yaml line 2: not valid YAML"),
        ("a: 1\x00\n", "r.yaml: not valid YAML"),
        ("? [a]\n: 1\n", "r.yaml line 1: expected the name of a setting"),
    ],
)
def test_a_wrong_recipe_is_answered_with_file_and_line(recipe, text, expected):
    assert expected in complaint(recipe(text))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--optimizer.learning_rate", "-1"], "--optimizer.learning_rate is -1.0; give a number above 0"),
        (["--objective.num_prototypes", "0"], "--objective.num_prototypes is 0; give 1 or more (default 4096)"),
        (["--objective", "amorlip", "--objective.rho", "none"], "--objective.rho is empty; give one number"),
        (["--train.batch_size", "1M"], "--train.batch_size: train.samples 96000 is below train.batch_size 1000000"),
        (["--temperature.initial", "3"], "--temperature.initial: temperature.minimum, initial, maximum are"),
    ],
)
def test_a_value_out_of_range_is_blamed_on_its_flag(flags, expected):
    assert complaint(None, *flags).startswith(expected)


def test_a_value_out_of_range_is_blamed_on_its_line(recipe):
    path = recipe("optimizer:\n  weight_decay: 0.1\n  learning_rate: -1\n")
    assert complaint(path).startswith("r.yaml line 3: optimizer.learning_rate is -1.0; give")


def test_a_missing_recipe_names_the_nearest_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert complaint(Path("tinny.yaml")).endswith("did you mean tiny?")
    assert "no recipe elsewhere/tiny.yaml" in complaint(Path("elsewhere/tiny.yaml"))


def test_a_run_given_as_a_recipe_is_answered_with_resume(tmp_path):
    (tmp_path / "settings.yaml").touch()
    assert f"--resume {tmp_path}" in complaint(tmp_path)


def test_a_recipe_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in complaint(tmp_path / "r.yaml")


def test_a_recipe_that_is_nested_too_deeply_is_refused(recipe):
    assert complaint(recipe("train: " + "[" * 5000)) == "r.yaml: not valid YAML: nested too deeply"


def test_aliases_that_mean_a_billion_values_are_not_followed(recipe):
    names = [f"a{depth}" for depth in range(10)]
    lines = "".join(f"  {b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in pairwise(names))
    assert "line 2: train.a0 is not a setting" in complaint(recipe(f"train:\n  a0: &a0 [x]\n{lines}"))


def test_words_between_flags_are_refused():
    assert complaint(None, "stray").startswith("'stray' is not a flag")


WORDS = strategies.sampled_from(
    ["train", "batch_size", "objective", "name", "rho", "on", "012", "1e400", ":", "\n", "  ", "-"]
)
TEXTS = strategies.lists(WORDS | strategies.sampled_from("{}[]&*!|>'\"%@,.#?~=") | strategies.text(max_size=3)).map(
    "".join
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_any_text_as_a_recipe_gives_settings_or_a_one_line_error(recipe, text):
    try:
        read_settings(recipe(text))
    except UserError as error:
        assert str(error).startswith("r.yaml")


@settings(max_examples=200, deadline=None)
@given(strategies.lists(TEXTS.map("--{}".format) | TEXTS | strategies.sampled_from(["--train.samples", "--objective"])))
def test_any_text_as_flags_gives_settings_or_a_user_error(flags):
    with suppress(UserError):
        read_settings(None, flags)
