"""Who may import whom (docs/decisions.md): down the list only, and neighbours do not know each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import neuclip

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
