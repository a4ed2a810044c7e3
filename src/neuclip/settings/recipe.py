"""A recipe: YAML with one section per group of fields. Read with the line of every value, for errors that say where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from neuclip.errors import UserError
from neuclip.settings.keys import OBJECTIVE_KEY, SECTION_NAMES
from neuclip.settings.nearest import proposal
from neuclip.settings.values import RawValue, shown

SHIPPED = Path(__file__).parents[1] / "recipes"
DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet", ".tar", ".gz", ".tgz")
YAML_TAG = "tag:yaml.org,2002:"


def shipped_recipes() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_recipe(asked: Path) -> Path:
    """A file, or the name of a shipped recipe ('tiny', 'tiny.yaml')."""
    if asked.is_file() and asked.suffix in DATA_SUFFIXES:
        raise UserError(f"{asked} is no recipe; data is given with --data.train {asked}")
    if asked.is_file():
        return asked
    if str(asked).removesuffix(".yaml") in shipped_recipes():
        return SHIPPED / f"{asked.stem}.yaml"
    if (asked / "settings.yaml").is_file():
        raise UserError(
            f"{asked} is a run, not a recipe; continue it with --resume {asked}, "
            f"or repeat it with {asked / 'settings.yaml'}"
        )
    if asked.is_dir():
        raise UserError(
            f"{asked} is a folder, not a recipe; data is given with --data.train {asked}, "
            f"a recipe is a YAML file or one of {', '.join(shipped_recipes())}"
        )
    raise UserError(
        f"no recipe {asked}: neither a file nor a shipped recipe; {proposal(asked.stem, shipped_recipes())}"
    )


def read_recipe(path: Path) -> list[RawValue]:
    """Every value of a recipe with its key and line. Whether a key exists, and its type, is not looked at here."""
    name = path.name if path.parent == SHIPPED else str(path)
    root = compose(path, name)
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{name} line {line_of(root)}: expected sections such as 'train:' with their fields below them")
    return [
        given
        for key, node, line in entries(root, name, "")
        for given in section_values(key, node, f"{name} line {line}", name)
    ]


def compose(path: Path, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
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
    value = plain(node)
    if section not in SECTION_NAMES:
        yield RawValue(section, value, place)  # the reader names the nearest key
    elif isinstance(node, yaml.MappingNode):
        for field, field_node, line in entries(node, name, f"{section}."):
            yield RawValue(f"{section}.{field}", plain(field_node), f"{name} line {line}")
    elif section == "objective" and value is not None:
        yield RawValue(OBJECTIVE_KEY, value, place)
    elif value is not None:  # a section without fields says nothing
        raise UserError(f"{place}: {section} is {shown(value)}; give its fields in the lines below, indented")


def entries(mapping: yaml.MappingNode, name: str, prefix: str) -> Iterator[tuple[str, yaml.Node, int]]:
    """Key, value and line of each entry; a key given twice is an error, where YAML drops the first silently."""
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


def plain(node: yaml.Node) -> Any:
    """What `RawValue.value` holds. Numbers stay text: the declared type, not YAML, says what 012 or 1e-3 is."""
    if isinstance(node, yaml.SequenceNode):
        return [plain(item) if isinstance(item, yaml.ScalarNode) else {} for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {}
    if node.tag == f"{YAML_TAG}null":
        return None
    if node.tag == f"{YAML_TAG}bool":
        return yaml.SafeLoader.bool_values.get(node.value.lower(), node.value)
    return node.value
