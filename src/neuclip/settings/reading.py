"""Reads the settings of a run: a recipe, then flags; later wins. Every error says where, what and what to do."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from neuclip.errors import UserError
from neuclip.settings.keys import OBJECTIVE_KEY, SECTION_NAMES, declared_type, section_type
from neuclip.settings.nearest import proposal
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.recipe import SHIPPED, find_recipe, read_recipe
from neuclip.settings.sections import Settings
from neuclip.settings.values import RawValue, convert, describe

Values = dict[str, tuple[RawValue, Any]]  # key -> the value as given, and in its declared type


def read_settings(recipe: Path | None = None, flags: Sequence[str] = ()) -> Settings:
    """The settings of a run.

    `recipe` is a file or the name of a shipped recipe; None is the shipped 'tiny'. If a flag chooses another objective,
    the recipe's fields of its own objective are ignored.

    >>> read_settings(None, ["--objective", "clip", "--train.samples", "10k"]).train.samples
    10000
    """
    from_recipe = read_recipe(find_recipe(recipe) if recipe else SHIPPED / "tiny.yaml")
    from_flags = read_flags(flags)
    recipe_objective = objective_name(from_recipe, Settings.objective_name)
    objective = objective_name(from_flags, recipe_objective)
    values = convert_all(from_recipe, recipe_objective)
    if objective != recipe_objective:
        values = {key: value for key, value in values.items() if not key.startswith("objective.")}
    return build(objective, values | convert_all(from_flags, objective))


def read_flags(flags: Sequence[str]) -> list[RawValue]:
    values = []
    for name, value in split_flags(flags):
        if name is None:
            raise UserError(f"{describe(value)} is not a flag; flags look like --train.batch_size 128")
        values.append(RawValue(OBJECTIVE_KEY if name == "objective" else name, value))
    return values


def split_flags(arguments: Sequence[str], switches: Collection[str] = ()) -> list[tuple[str | None, str | None]]:
    """`--name value`, `--name=value` and bare `--name` as pairs (name, value); the name of an argument that is no flag
    is None.

    Names come without leading dashes and with `_` for `-`. A flag is bare, with value None, if it is one of `switches`
    or if the next argument begins with two dashes; a negative number is a value.

    >>> split_flags(["tiny", "--train.batch-size", "64", "--json"], switches=["json"])
    [(None, 'tiny'), ('train.batch_size', '64'), ('json', None)]
    """
    pairs: list[tuple[str | None, str | None]] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            pairs.append((None, argument))
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        if equals:
            pairs.append((name, value))
        elif name in switches or not rest or rest[0].startswith("--"):
            pairs.append((name, None))
        else:
            pairs.append((name, rest.pop(0)))
    return pairs


def objective_name(source: Iterable[RawValue], default: str) -> str:
    name = default
    for raw in source:
        if raw.key == OBJECTIVE_KEY:
            if raw.value not in list(OBJECTIVES):
                remedy = proposal(str(raw.value), list(OBJECTIVES))
                raise raw.error(f"{OBJECTIVE_KEY} is {describe(raw.value)}; {remedy}")
            name = raw.value
    return name


def convert_all(source: Iterable[RawValue], objective: str) -> Values:
    """The fields of one source in their declared types; the objective's name is not a field."""
    return {raw.key: (raw, convert(raw, declared_type(raw, objective))) for raw in source if raw.key != OBJECTIVE_KEY}


def build(objective: str, values: Values) -> Settings:
    sections = {name: build_section(name, section_type(name, objective), values) for name in SECTION_NAMES}
    return Settings(objective_name=objective, **sections)


def build_section(section: str, kind: type, values: Values) -> Any:
    own = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{section}.")}
    try:
        return kind(**{field: value for field, (_, value) in own.items()})
    except UserError as error:
        culprit = find_culprit(str(error), {field: raw for field, (raw, _) in own.items()})
        if culprit is None:
            raise
        raise culprit.error(str(error)) from None


def find_culprit(message: str, raw_values: Mapping[str, RawValue]) -> RawValue | None:
    """The value that a section's own check refused: of the fields its message names, a flag before the recipe."""
    complaint = message.partition(";")[0]  # the remedy after it may name other fields
    named = [raw_values[word] for word in re.findall(r"\w+", complaint) if word in raw_values]
    return min(named, key=lambda value: value.place != "", default=None)
