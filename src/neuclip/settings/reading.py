"""Reads the settings of a run: a recipe, then flags, later wins. Every error says where, what and what instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from neuclip.errors import UserError
from neuclip.settings.flags import split_flags
from neuclip.settings.keys import OBJECTIVE_KEY, SECTION_NAMES, declared_type, section_type
from neuclip.settings.nearest import proposal
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.recipe import SHIPPED, find_recipe, read_recipe
from neuclip.settings.sections import Settings
from neuclip.settings.values import RawValue, convert, shown

Values = dict[str, tuple[RawValue, Any]]  # key -> where it was given, and its value in the declared type


def read_settings(recipe: Path | None = None, flags: Sequence[str] = ()) -> Settings:
    """The settings of a run.

    `recipe` is a file or the name of a shipped recipe; None is the shipped 'tiny'. Choosing another objective by flag
    leaves the recipe's fields of its own objective aside.

    >>> read_settings(None, ["--objective", "clip", "--train.samples", "10k"]).train.samples
    10000
    """
    from_recipe = read_recipe(find_recipe(recipe) if recipe else SHIPPED / "tiny.yaml")
    from_flags = given_flags(flags)
    recipe_objective = objective_name(from_recipe, Settings.objective_name)
    objective = objective_name(from_flags, recipe_objective)
    values = checked(from_recipe, recipe_objective)
    if objective != recipe_objective:
        values = {key: value for key, value in values.items() if not key.startswith("objective.")}
    return build(objective, values | checked(from_flags, objective))


def given_flags(flags: Sequence[str]) -> list[RawValue]:
    given = []
    for name, value in split_flags(flags):
        if name is None:
            raise UserError(f"{value!r} is not a flag; flags look like --train.batch_size 128")
        given.append(RawValue(OBJECTIVE_KEY if name == "objective" else name, value))
    return given


def objective_name(source: Iterable[RawValue], default: str) -> str:
    name = default
    for given in source:
        if given.key == OBJECTIVE_KEY:
            if given.value not in list(OBJECTIVES):
                remedy = proposal(str(given.value), list(OBJECTIVES))
                raise given.wrong(f"{OBJECTIVE_KEY} is {shown(given.value)}; {remedy}")
            name = given.value
    return name


def checked(source: Iterable[RawValue], objective: str) -> Values:
    """The fields of one source in their declared types; the objective's name is not a field."""
    return {
        given.key: (given, convert(given, declared_type(given, objective)))
        for given in source
        if given.key != OBJECTIVE_KEY
    }


def build(objective: str, values: Values) -> Settings:
    sections = {name: build_section(name, section_type(name, objective), values) for name in SECTION_NAMES}
    return Settings(objective_name=objective, **sections)


def build_section(section: str, kind: type, values: Values) -> Any:
    mine = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{section}.")}
    try:
        return kind(**{field: value for field, (_, value) in mine.items()})
    except UserError as error:
        given = find_culprit(str(error), {field: given for field, (given, _) in mine.items()})
        if given is None:
            raise
        raise given.wrong(str(error)) from None


def find_culprit(message: str, given: Mapping[str, RawValue]) -> RawValue | None:
    """The given value that a section's own check refused: of the fields its message names, a flag before the recipe."""
    finding = message.partition(";")[0]  # the remedy behind it may name other fields
    named = [given[word] for word in re.findall(r"\w+", finding) if word in given]
    return min(named, key=lambda one: one.place != "", default=None)
