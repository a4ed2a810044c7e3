"""Who may import whom (docs/decisions.md): down the list only, and neighbours do not know each other; and what of the
package a test may use: its doors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import neuclip
from tests import DOORS

PACKAGE = Path(neuclip.__file__).parent
FLOOR = {"errors", "files", "formatting", "progress", "secrets", "settings", "records", "tasks"}
MIDDLE = FLOOR | {"distributed", "machine"}
PARTS = MIDDLE | {"objectives", "models", "data", "plan"}
MAY_IMPORT = {
    "errors": set(),
    "formatting": set(),
    "progress": {"formatting"},
    "secrets": set(),
    "settings": {"errors", "secrets"},
    "files": {"errors"},
    "records": {"errors", "files", "settings"},
    "tasks": {"errors", "files"},
    "distributed": FLOOR,
    "machine": {"errors"},
    "plan": FLOOR,
    "objectives": {"errors", "settings", "distributed"},
    "models": MIDDLE,
    "data": MIDDLE,
    "training": PARTS,
    "evaluation": PARTS,
    "report": FLOOR,
    "search": FLOOR | {"machine", "models", "data"},
    "runs": PARTS | {"training", "evaluation", "report"},
    "api": PARTS | {"runs", "training", "evaluation", "report"},
    "experiments": PARTS | {"api", "runs", "training", "evaluation", "report", "search"},
    "cli": FLOOR | {"api", "data", "experiments", "report", "runs", "search"},
}
# Inside a folder, too, imports go down only: from the top of these lists to the bottom, and not among neighbours.
INSIDE = {
    "data": [
        {"evaluation_sets"},
        {"held_out", "convert"},
        {"task_sets", "loader"},
        {"open", "features"},
        {"mixture"},
        {"tables", "tar"},
        {"faults"},
        {"locations", "decoding"},
        {"source", "order", "by_name"},
    ],
    "objectives": [
        {"__init__"},
        {"drrho"},
        {"clip", "siglip", "fastclip", "amorlip", "neuclip", "scent"},
        {"table"},
        {"objective", "contrast", "mlp", "prototypes"},
        {"pairs", "state"},
        {"formulas"},
    ],
}
NO_TORCH = (*FLOOR, "report", "cli")


def imports(file: Path, *, lazy: bool) -> list[str]:
    """Modules that a file imports; without `lazy`, only what importing the file itself imports."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if lazy else iter(tree.body)
    found = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def layer(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def files() -> list[Path]:
    return [file for file in PACKAGE.rglob("*.py") if not layer(file).startswith("__")]


def test_imports_go_down_only():
    wrong = []
    for file in files():
        for module in imports(file, lazy=True):
            other = module.split(".")[1] if module.startswith("neuclip.") else layer(file)
            known = other in MAY_IMPORT  # else a public name of the package itself, such as __version__
            if known and other != layer(file) and other not in MAY_IMPORT[layer(file)]:
                wrong.append(f"{file.relative_to(PACKAGE)} must not import {module}")
    assert wrong == []


@pytest.mark.parametrize("folder", INSIDE)
def test_imports_go_down_only_inside_a_folder(folder):
    level = {part: number for number, parts in enumerate(INSIDE[folder]) for part in parts}
    wrong = []
    for file in (PACKAGE / folder).rglob("*.py"):
        own = file.relative_to(PACKAGE / folder).parts[0].removesuffix(".py")
        for module in imports(file, lazy=True):
            other = module.removeprefix(f"neuclip.{folder}.").split(".")[0]
            if module.startswith(f"neuclip.{folder}.") and own != other and level[own] >= level[other]:
                wrong.append(f"{file.relative_to(PACKAGE)} must not import {module}")
    assert wrong == []


def test_the_icons_know_the_package_and_the_package_knows_them_in_one_place():
    knowing = [file for file in PACKAGE.rglob("*.py") if any(map(is_icons, imports(file, lazy=True)))]
    assert knowing == [PACKAGE / "data" / "by_name.py"]
    assert not any(map(is_icons, imports(knowing[0], lazy=False)))


def is_icons(module: str) -> bool:
    return module.split(".")[0] == "neuclip_icons"


def test_formulas_know_torch_alone():
    found = imports(PACKAGE / "objectives" / "formulas.py", lazy=True)
    assert found and not [module for module in found if module.startswith("neuclip.")]


def test_the_floor_the_report_and_the_command_line_import_no_torch_of_their_own():
    heavy = ("torch", "numpy", "open_clip", "PIL")
    for file in files():
        if layer(file) in NO_TORCH:
            found = [module for module in imports(file, lazy=False) if module.split(".")[0] in heavy]
            assert found == [], file


def test_only_models_touches_open_clip():
    for file in files():
        if layer(file) != "models":
            assert not any(module.split(".")[0] == "open_clip" for module in imports(file, lazy=True)), file


def test_every_part_of_the_package_has_its_place_in_the_list():
    assert {layer(file) for file in files()} == set(MAY_IMPORT)


# The doors of the tests

TESTS = Path(__file__).parent
PATCHES = ("delattr", "setattr", "setitem")
MODULES = {
    ".".join(("neuclip", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for file in PACKAGE.rglob("*.py")
}


def doors(group: str) -> set[str]:
    entries = re.search(rf"^# {group}.*\n((?:[\w.]+\n)*)", DOORS, flags=re.MULTILINE)[1].split()
    assert entries == sorted(entries)
    return {entry if entry == "neuclip" else f"neuclip.{entry}" for entry in entries}


def used_names(file: Path) -> set[str]:
    """What a test uses of neuclip: what it imports, attributes of modules that it imports, and what it patches."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imported = [
        (alias.asname or alias.name, f"{getattr(node, 'module', '')}.{alias.name}".lstrip("."))
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    modules = {name: module for name, module in imported if module in MODULES}
    found = {*(name for _, name in imported), *of_modules(tree, modules)}
    return {name for name in found - MODULES if name.startswith("neuclip.") and "__" not in name}


def of_modules(tree: ast.Module, modules: dict[str, str]) -> Iterator[str]:
    """`modules`: by the names that they have in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"{modules[node.value.id]}.{node.attr}"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in PATCHES:
            match node.args:
                case [ast.Constant(value=str(target)), *_]:
                    yield target
                case [ast.Name(id=name), ast.Constant(value=str(target)), *_] if name in modules:
                    yield f"{modules[name]}.{target}"


@cache
def all_used() -> dict[str, set[str]]:
    """By test."""
    return {str(file.relative_to(TESTS)): used_names(file) for file in sorted(TESTS.rglob("*.py"))}


GROUPS = re.findall(r"^# (.*)$", DOORS, flags=re.MULTILINE)


def test_a_test_uses_the_package_by_its_doors_and_no_private_name():
    open_ = set().union(*map(doors, GROUPS))
    shut = [
        f"{file}: {name} is no door (tests/__init__.py)"
        for file, names in all_used().items()
        for name in sorted(names)
        if name not in open_ and (name.rpartition(".")[0] not in open_ or name.rpartition(".")[2].startswith("_"))
    ]
    assert shut == []


def test_what_no_test_uses_any_more_is_taken_off_the_list():
    used = set().union(*all_used().values())
    assert sorted((doors("inside") | doors("sizes")) - used) == []
