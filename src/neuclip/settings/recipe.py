"""A recipe: YAML with one mapping per section. Each value is read with its line, which errors name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from neuclip.errors import UserError
from neuclip.settings.keys import OBJECTIVE_KEY, SECTION_NAMES
from neuclip.settings.nearest import any_of, proposal
from neuclip.settings.values import RawValue, describe

SHIPPED = Path(__file__).parents[1] / "recipes"
DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet", ".tar", ".gz", ".tgz")
YAML_TAG = "tag:yaml.org,2002:"


class PlainLoader(yaml.SafeLoader):
    """Refuses aliases: with aliases of aliases ten lines mean a billion values. `read_recipe` does not expand them."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        return super().compose_node(parent, index)


def shipped_recipes() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_recipe(path: Path) -> Path:
    """A file, or the name of a shipped recipe ('tiny', 'tiny.yaml')."""
    if path.is_file() and path.suffix not in DATA_SUFFIXES:
        return path
    if str(path).removesuffix(".yaml") in shipped_recipes():
        return SHIPPED / f"{path.stem}.yaml"
    settings = path / "settings.yaml"
    if settings.is_file():
        raise UserError(f"{path} is a run, not a recipe; to continue, give --resume {path}; to repeat it, {settings}")
    if path.is_dir() or path.is_file():
        choices = any_of(["a YAML file", *shipped_recipes()])
        raise UserError(f"{path} is not a recipe; give data as --data.train {path}, and as recipe {choices}")
    raise UserError(f"no recipe {path}: neither a file nor a shipped recipe; {proposal(path.stem, shipped_recipes())}")


def read_recipe(path: Path) -> list[RawValue]:
    """Every value of a recipe with its key and line; keys and types are not checked here."""
    name = path.name if path.parent == SHIPPED else str(path)
    root = parse_yaml(path, name)
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{name} line {line_of(root)}: expected sections such as 'train:' with their fields below them")
    return [
        raw
        for key, node, line in entries(root, name, "")
        for raw in section_values(key, node, f"{name} line {line}", name)
    ]


def parse_yaml(path: Path, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
    except RecursionError:
        raise UserError(f"{name}: its values are nested too deeply; give one mapping per section") from None
    except UnicodeDecodeError:
        raise UserError(f"{name} is not a text file in UTF-8") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name} line {mark.line + 1}" if mark else name
        raise UserError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None


def section_values(section: str, node: yaml.Node, place: str, name: str) -> Iterator[RawValue]:
    value = raw_value(node)
    if section not in SECTION_NAMES:
        yield RawValue(section, value, place)  # `declared_type` names the nearest key
    elif isinstance(node, yaml.MappingNode):
        for field, field_node, line in entries(node, name, f"{section}."):
            yield RawValue(f"{section}.{field}", raw_value(field_node), f"{name} line {line}")
    elif section == "objective" and value is not None:
        yield RawValue(OBJECTIVE_KEY, value, place)
    elif value is not None:  # an empty section is allowed
        raise UserError(f"{place}: {section} is {describe(value)}; give its fields in the lines below, indented")


def entries(mapping: yaml.MappingNode, name: str, prefix: str) -> Iterator[tuple[str, yaml.Node, int]]:
    """Key, value and line of each entry. A key that is given twice is an error; YAML would drop the first silently."""
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
        yield key, value, line


def line_of(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def raw_value(node: yaml.Node) -> Any:
    """The node's value for `RawValue`. Numbers stay text: the declared type, not YAML, decides what 012 or 1e-3 is."""
    if isinstance(node, yaml.SequenceNode):
        return [raw_value(item) if isinstance(item, yaml.ScalarNode) else {} for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {}
    if node.tag == f"{YAML_TAG}null":
        return None
    if node.tag == f"{YAML_TAG}bool":
        return yaml.SafeLoader.bool_values.get(node.value.lower(), node.value)
    return node.value
