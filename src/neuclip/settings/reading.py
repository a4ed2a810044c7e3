"""Reads the settings of a run from a recipe and flags; flags override the recipe. Errors say where, what is wrong, and
what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from neuclip.errors import UserError, any_of, nearest, proposal
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.options import OptionError, types_of
from neuclip.settings.sections import Settings
from neuclip.settings.values import RawValue, describe

OBJECTIVE_KEY = "objective.name"
SECTION_NAMES = tuple(name for name in types_of(Settings) if name != "objective_name")
SHIPPED = Path(__file__).parents[1] / "recipes"
DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet", ".tar", ".gz", ".tgz")

Values = dict[str, tuple[RawValue, Any]]  # key -> the value as typed, and converted to its declared type


def read_settings(recipe: Path | None = None, flags: Sequence[str] = ()) -> Settings:
    """The settings of a run.

    `recipe` is a file or the name of a shipped recipe; None means the shipped 'tiny'. If a flag chooses another
    objective than the recipe, the recipe's fields of `objective` are ignored.

    >>> read_settings(None, ["--objective", "clip", "--train.samples", "10k"]).train.samples
    10000
    """
    return build_settings(read_recipe(find_recipe(recipe) if recipe else SHIPPED / "tiny.yaml"), read_flags(flags))


def build_settings(from_recipe: Sequence[RawValue], from_flags: Sequence[RawValue] = ()) -> Settings:
    recipe_objective = objective_name(from_recipe, Settings.objective_name)
    objective = objective_name(from_flags, recipe_objective)
    values = convert_all(from_recipe, recipe_objective)
    if objective != recipe_objective:
        values = {key: value for key, value in values.items() if not key.startswith("objective.")}
    return build(objective, values | convert_all(from_flags, objective))


def objective_name(source: Iterable[RawValue], default: str) -> str:
    names = [raw for raw in source if raw.key == OBJECTIVE_KEY]
    for raw in names:
        if raw.value not in list(OBJECTIVES):
            remedy = proposal(str(raw.value), list(OBJECTIVES))
            raise raw.error(f"{OBJECTIVE_KEY} is {describe(raw.value)}; {remedy}")
    return names[-1].value if names else default


def convert_all(source: Iterable[RawValue], objective: str) -> Values:
    """The options of one source (recipe or flags) in their declared types, without the objective's name."""
    return {raw.key: (raw, raw.convert(declared_type(raw, objective))) for raw in source if raw.key != OBJECTIVE_KEY}


def build(objective: str, values: Values) -> Settings:
    sections: dict[str, Any] = {}
    for section in SECTION_NAMES:
        options = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{section}.")}
        try:
            sections[section] = section_type(section, objective)(
                **{name: value for name, (_, value) in options.items()}
            )
        except OptionError as error:
            culprits = [options[name][0] for name in error.names if name in options]
            culprit = min(culprits, key=lambda raw: raw.location != "")  # a flag rather than a line of the recipe
            raise culprit.error(str(error)) from None
    return Settings(objective_name=objective, **sections)


# Which settings exist


def section_type(section: str, objective: str) -> Any:
    """The dataclass of a section; for the section `objective` it depends on the objective's name."""
    return OBJECTIVES[objective] if section == "objective" else types_of(Settings)[section]


@cache
def declared_types(objective: str) -> dict[str, Any]:
    """The type of every key of a run with this objective: {'train.batch_size': int, ...}."""
    return {
        f"{section}.{name}": declared
        for section in SECTION_NAMES
        for name, declared in types_of(section_type(section, objective)).items()
    }


def changed_fields(before: Settings, after: Settings) -> list[str]:
    """The keys in which two runs differ, such as ['train.samples']; only ['objective.name'] if that differs."""
    if before.objective_name != after.objective_name:
        return [OBJECTIVE_KEY]
    keys = declared_types(before.objective_name)
    return [key for key in keys if attrgetter(key)(before) != attrgetter(key)(after)]


def may_change_at_resume(key: str, objective: str) -> bool:
    """Whether a run may be resumed with another value of this key.

    >>> may_change_at_resume("data.workers", "clip"), may_change_at_resume("train.batch_size", "clip")
    (True, False)
    """
    section, _, name = key.partition(".")
    kind = section_type(section, objective)
    return kind.may_change or any(one.metadata.get("may_change") for one in fields(kind) if one.name == name)


def declared_type(raw: RawValue, objective: str) -> Any:
    """The type of a key. Raises UserError that proposes the nearest key if it does not exist."""
    types = declared_types(objective)
    if raw.key in types:
        return types[raw.key]
    if owners := [name for name in OBJECTIVES if raw.key in declared_types(name)]:
        raise raw.error(
            f"{raw.key} belongs to objective {owners[0]}, but the objective is {objective}; "
            f"choose objective {owners[0]} or remove it"
        )
    dashes, section = "" if raw.location else "--", raw.key.partition(".")[0]
    siblings = ", ".join(dashes + key for key in [OBJECTIVE_KEY, *types] if key.startswith(f"{section}."))
    if raw.key in SECTION_NAMES:
        raise raw.error(f"{raw.key} is a section; its fields are {siblings}")
    if isinstance(raw.value, dict):  # a section of a recipe
        raise raw.error(f"{raw.key} is not a section; {proposal(raw.key, SECTION_NAMES)}")
    remedy = f"{section} has {siblings}" if siblings else f"the sections are {', '.join(SECTION_NAMES)}"
    if near := [dashes + key for key in nearest_keys(raw.key)]:
        remedy = f"did you mean {any_of(near)}?"
    raise raw.error(f"{raw.key} is not a setting; {remedy}")


def nearest_keys(key: str) -> list[str]:
    """At most two keys that the user probably meant. Keys of the same section come first, then keys with the same field
    name in other sections, then the most similar name.

    >>> nearest_keys("batch_size")
    ['train.batch_size', 'evaluation.batch_size']
    """
    section, _, field = key.rpartition(".")
    known = dict.fromkeys([OBJECTIVE_KEY, *(key for name in OBJECTIVES for key in declared_types(name))])
    fields = {other: other.partition(".")[2] for other in known}
    initials = {other: "".join(part[0] for part in name.split("_") if part) for other, name in fields.items()}  # lr
    namesakes = [other for other in known if field == fields[other] or (len(field) > 1 and field == initials[other])]
    prefix = f"{nearest(section, SECTION_NAMES)}."
    siblings = {fields[other]: other for other in reversed(known) if other.startswith(prefix)}
    everywhere = {fields[other]: other for other in reversed(known)}
    same = [other for other in namesakes if other.startswith(prefix)] or [siblings.get(nearest(field, siblings), "")]
    keys = same[:1] if same[0] else namesakes[:2] or [everywhere.get(nearest(field, everywhere), "")]
    return [key for key in keys if key]


# Flags


def read_flags(flags: Sequence[str]) -> list[RawValue]:
    values = []
    for name, value in split_flags(flags):
        if name is None:
            raise UserError(f"{describe(value)} is not a flag; flags look like --train.batch_size 128")
        values.append(RawValue(OBJECTIVE_KEY if name == "objective" else name, value))
    return values


def split_flags(arguments: Sequence[str], switches: Collection[str] = ()) -> list[tuple[str | None, str | None]]:
    """Pairs (name, value) of the flags `--name value`, `--name=value` and bare `--name`. For an argument that is not a
    flag, the name is None.

    Names lose their leading dashes, and `-` becomes `_`. A flag is bare (value None) if it is one of `switches`, if it
    is the last argument or if the next one begins with two dashes; a negative number is a value.

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


# Recipes


def shipped_recipes() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_recipe(path: Path) -> Path:
    """The file of a recipe: `path` itself, or a shipped recipe of this name ('tiny', 'tiny.yaml')."""
    if path.is_file() and path.suffix not in DATA_SUFFIXES:
        return path
    if str(path).removesuffix(".yaml") in shipped_recipes():
        return SHIPPED / f"{path.stem}.yaml"
    settings = path / "settings.yaml"
    if settings.is_file():
        raise UserError(f"{path} is a run, not a recipe; to continue, give --resume {path}; to repeat it, {settings}")
    if path.exists():
        choices = any_of(["a YAML file", *shipped_recipes()])
        raise UserError(f"{path} is not a recipe; if it is data, give --data.train {path}; a recipe is {choices}")
    raise UserError(f"no recipe {path}: neither a file nor a shipped recipe; {proposal(path.stem, shipped_recipes())}")


def read_recipe(path: Path) -> list[RawValue]:
    """Every value of a recipe with its key and line. Keys and types are not checked yet."""
    name = path.name if path.parent == SHIPPED else str(path)
    try:
        return parse_recipe(path.read_text(encoding="utf-8-sig"), name)
    except UnicodeDecodeError:
        raise UserError(f"{name} is not a text file in UTF-8") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from None


def parse_recipe(text: str, name: str) -> list[RawValue]:
    """Every value of a recipe: YAML with one mapping per section. It is parsed to nodes, which know their lines and do
    not follow aliases."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        location = f"{name} line {mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        problem = "nested too deeply" if isinstance(error, RecursionError) else problem
        raise UserError(f"{location}: not valid YAML: {problem}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{name} line {line_of(root)}: expected sections such as 'train:' with their fields below them")
    values: list[RawValue] = []
    for section, node, location in entries(root, name, ""):
        value = raw_value(node)
        if section in SECTION_NAMES and isinstance(node, yaml.MappingNode):
            fields = entries(node, name, f"{section}.")
            values += [RawValue(f"{section}.{field}", raw_value(child), where) for field, child, where in fields]
        elif section == "objective" and value is not None:
            values.append(RawValue(OBJECTIVE_KEY, value, location))
        elif section not in SECTION_NAMES:
            values.append(RawValue(section, value, location))  # `declared_type` will raise and propose the nearest key
        elif value is not None:  # an empty section is allowed
            raise UserError(f"{location}: {section} is {describe(value)}; give its fields in the lines below, indented")
    return values


def entries(mapping: yaml.MappingNode, name: str, prefix: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """Key, value and location of each entry. A repeated key raises UserError: YAML would silently drop the first."""
    first_lines: dict[str, int] = {}
    for key_node, value in mapping.value:
        line = line_of(key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"{name} line {line}: expected the name of a setting before the colon")
        key = key_node.value.replace("-", "_")
        if key in first_lines:
            raise UserError(
                f"{name} line {line}: {prefix}{key} is given twice, first in line {first_lines[key]}; keep one"
            )
        first_lines[key] = line
        yield key, value, f"{name} line {line}"


def line_of(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def raw_value(node: yaml.Node) -> Any:
    """The node's value for `RawValue`. Numbers stay text: the declared type, not YAML, says what 012 or 1e-3 means."""
    if isinstance(node, yaml.SequenceNode):
        return [raw_value(item) if isinstance(item, yaml.ScalarNode) else {} for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {}
    if node.tag.endswith(":null"):
        return None
    if node.tag.endswith(":bool"):
        return yaml.SafeLoader.bool_values.get(node.value.lower(), node.value)
    return node.value
