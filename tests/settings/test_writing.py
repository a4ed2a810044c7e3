"""Written settings are complete, and read back equal whatever their values."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from hypothesis import assume, given, settings, strategies

from neuclip.errors import UserError
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.reading import SECTION_NAMES, read_settings, section_fields, section_type
from neuclip.settings.sections import Settings
from neuclip.settings.writing import settings_as_yaml

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
        return strategies.floats(0.999 * default, default or 1.0)
    if declared is str:
        return strategies.sampled_from(TROUBLESOME) | strategies.text()
    return strategies.floats(0.01, 1).map(lambda low: (low, 1.0))


@strategies.composite
def all_settings(draw: Any) -> Settings:
    objective = draw(strategies.sampled_from(sorted(OBJECTIVES)))
    sections = {}
    for section in SECTION_NAMES:
        chosen = {
            field.name: draw(values_of(declared, field.default))
            for field, declared in section_fields(section, objective)
        }
        try:
            sections[section] = section_type(section, objective)(**chosen)
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


def test_every_field_is_written_whether_given_or_not():
    stored = yaml.safe_load(settings_as_yaml(Settings()))
    for section in SECTION_NAMES:
        written = [name for name in stored[section] if (section, name) != ("objective", "name")]
        assert written == [field.name for field, _ in section_fields(section, "neuclip")]
