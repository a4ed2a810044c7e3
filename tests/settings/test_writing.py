"""Written settings are complete and read back equal whatever their values; the help leaves no option out."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from hypothesis import assume, given, settings, strategies

from neuclip.errors import UserError
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.options import types_of
from neuclip.settings.reading import SECTION_NAMES, declared_types, read_settings, section_type
from neuclip.settings.sections import Settings
from neuclip.settings.writing import help_text, settings_as_dict, settings_as_yaml

TROUBLESOME = ["", "on", "no", "null", "~", "none", "012", "1e-3", "a: b", "# c", "'", "two\nlines", "\x85", " ü 图 "]


def values_of(declared: Any, default: Any) -> strategies.SearchStrategy[Any]:
    """Values near the default, so that most pass their section's checks, and any text at all."""
    if get_origin(declared) is Literal:
        return strategies.sampled_from(get_args(declared))
    if get_origin(declared) in (Union, UnionType):  # X | None
        return strategies.none() | values_of(get_args(declared)[0], 1)
    if get_origin(declared) is tuple and Ellipsis in get_args(declared):
        element = get_args(declared)[0]
        return strategies.lists(values_of(element, element()), max_size=3).map(tuple)
    if declared is bool:
        return strategies.booleans()
    if declared is int:
        return strategies.integers(default, 2 * default or 2**40)
    if declared is float:
        return strategies.floats(*sorted((0.999 * default, default or 1.0)))
    if declared is str:
        return strategies.sampled_from(TROUBLESOME) | strategies.text()
    return strategies.floats(0.01, 1).map(lambda low: (low, 1.0))


@strategies.composite
def all_settings(draw: Any) -> Settings:
    objective = draw(strategies.sampled_from(sorted(OBJECTIVES)))
    sections = {}
    for section in SECTION_NAMES:
        kind = section_type(section, objective)
        types = types_of(kind)
        chosen = {field.name: draw(values_of(types[field.name], field.default)) for field in fields(kind)}
        try:
            sections[section] = kind(**chosen)
        except UserError:
            assume(False)
    return Settings(objective_name=objective, **sections)


@settings(max_examples=60, deadline=None)
@given(all_settings())
def test_written_settings_read_back_equal(original):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yaml"
        path.write_text(settings_as_yaml(original))
        assert read_settings(path) == original


@settings(max_examples=30, deadline=None)
@given(all_settings())
def test_plain_yaml_readers_see_the_same_values(original):
    stored = yaml.safe_load(settings_as_yaml(original))
    assert stored["optimizer"]["eps"] == original.optimizer.eps
    assert stored["run"]["name"] == original.run.name
    assert tuple(stored["evaluation"]["retrieval"]) == original.evaluation.retrieval


def test_every_option_is_written_whether_given_or_not():
    stored = yaml.safe_load(settings_as_yaml(Settings()))
    assert list(stored) == list(SECTION_NAMES) and stored["objective"].pop("name") == "neuclip"
    assert [f"{section}.{name}" for section in stored for name in stored[section]] == list(declared_types("neuclip"))


def test_settings_as_a_dict_have_the_objectives_name_first():
    values = settings_as_dict(Settings())
    assert list(values) == list(SECTION_NAMES)
    assert list(values["objective"].items())[:2] == [("name", "neuclip"), ("mask_duplicates", False)]
    assert values["data"]["crop_scale"] == (0.9, 1.0)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_help_names_every_option_of_every_objective(objective):
    text = help_text()
    assert [key for key in declared_types(objective) if f"--{key} " not in text] == []


def test_the_help_tells_default_tiny_value_and_what_a_flag_takes():
    assert "[default: 1024; tiny: 128]" in help_text(["train"])
    assert "--data.crop_scale X,X " in help_text(["data"])
    text = help_text(["objective"])
    assert "--objective clip|siglip|fastclip|amorlip|neuclip|scent\n" in text
    assert "--objective.network_lr X " in text and "--objective.rho X,... " in text
    assert "--objective.restart periodic|rolling " in text and "--objective.reinitialise true|false " in text


def test_help_of_one_section_holds_no_other():
    assert "--log.every" in help_text(["log"])
    assert "--train.samples" not in help_text(["log"])


def test_no_line_of_the_help_is_wider_than_a_wide_terminal():
    assert max(len(line) for line in help_text().splitlines()) <= 110
