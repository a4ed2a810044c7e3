"""What a plain install has, without any extra, what the wheel holds, and what `make` installs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from neuclip.cli.main import COMMANDS
from neuclip.errors import EXTRAS
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import settings_as_yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDS_NO_EXTRA = {"cli", "distributed", "errors", "files", "objectives", "plan"}
NEEDS_NO_EXTRA |= {"records", "report", "settings", "tasks"}

# A plain install in a process of its own: what the extras bring cannot be imported.
PLAIN = """
import contextlib, importlib, io, json, pkgutil, sys

EXTRA = set(sys.argv[1].split())

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRA:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import neuclip, neuclip_icons
from neuclip.cli.main import main

def answer(command):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(command)
    return code, errors.getvalue()

def of_import(name):
    try:
        importlib.import_module(name)
    except ImportError as error:
        return error.name.partition(".")[0]

def of_name(name):
    try:
        getattr(neuclip, name)
    except ImportError as error:
        return str(error)

parts = [(part.__path__, part.__name__ + ".") for part in (neuclip, neuclip_icons)]
modules = [module.name for part in parts for module in pkgutil.walk_packages(*part)]
import torch
features = torch.nn.functional.normalize(torch.randn(8, 4), dim=1).requires_grad_()
neuclip.NeuCLIP(embed_dim=4)(features, features, torch.tensor(10.0)).backward()
print(json.dumps({
    "gradient": float(features.grad.abs().sum()),
    "names": {name: of_name(name) for name in neuclip.__all__},
    "answers": [answer(command) for command in json.loads(sys.argv[2])],
    "modules": {name: of_import(name) for name in modules if not name.endswith("__main__")},
}))
"""
OF_EXTRAS = (
    "PIL aiohttp braceexpand fsspec huggingface_hub jinja2 onnx onnxruntime onnxscript open_clip pyarrow resvg_py "
    "safetensors simplejpeg tensorboard timm torchvision transformers wandb"
)
HELP = [["--version"], ["--help"], *([*name.split(), "--help"] for name in COMMANDS), ["recipe", "cc3m", "clip"]]
WORK = {  # command: arguments that lead it to its work
    "train": "",
    "eval": "runs/one",
    "error": "runs/one",
    "report": "runs/one",
    "compare": "runs/one runs/two",
    "experiment": "restarts",
    "search": "local-dir:model photos words",
    "merge": "local-dir:model local-dir:model",
    "export": "local-dir:model --to open_clip",
    "doctor": "photos",
    "data get": "cifar10",
    "data convert": "photos out",
    "data index": "photos",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    for name in ("model", "photos", "runs/one", "runs/two"):
        (folder / name).mkdir(parents=True)
    (folder / "model" / "open_clip_config.json").write_text("{}")
    for name in ("one", "two"):
        (folder / "runs" / name / "settings.yaml").write_text(settings_as_yaml(read_settings()))
    commands = [*HELP, *(f"{name} {arguments}".split() for name, arguments in WORK.items())]
    arguments = [sys.executable, "-c", PLAIN, OF_EXTRAS, json.dumps(commands)]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_losses_the_help_and_the_paper_s_settings_need_no_extra(plain):
    assert plain["gradient"] > 0
    assert [code for code, _ in plain["answers"][: len(HELP)]] == [0] * len(HELP)
    needing = {name.split(".")[1] for name, package in plain["modules"].items() if package}
    assert not needing & NEEDS_NO_EXTRA
    assert plain["modules"]["neuclip.training.large_batch"] is None


def test_a_command_without_its_extra_says_in_one_line_what_installs_it(plain):
    assert set(WORK) == set(COMMANDS) - {"recipe"}
    for name, (code, errors) in zip(WORK, plain["answers"][len(HELP) :], strict=True):
        assert code == 2, (name, errors)
        assert re.fullmatch(rf"neuclip: {name} needs \w+; install with: pip install .*\[train\].*\n", errors), name


def test_a_name_without_its_extra_is_an_import_error_that_says_the_same(plain):
    without = {name: error for name, error in plain["names"].items() if error}
    assert set(without) == {"train", "evaluate", "load"}
    for name, error in without.items():
        assert re.fullmatch(rf"neuclip\.{name} needs \w+; install with: pip install .*\[train\].*", error)


def test_every_module_imports_or_names_a_package_of_an_extra(plain):
    assert set(plain["modules"].values()) - {None} <= set(EXTRAS)


def brought_by(extra: str) -> set[str]:
    """Names of the distributions that pip installs with an extra, one level below it included."""
    found: set[str] = set()
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == "neuclip":
            found |= set().union(*(brought_by(other) for other in requirement.extras))
        else:
            below = map(Requirement, requires(requirement.name) or ())
            plain = [one.name for one in below if not one.marker or one.marker.evaluate({"extra": ""})]
            found |= {requirement.name, *plain}
    return {re.sub(r"[-_.]+", "-", name).lower() for name in found}


@pytest.mark.parametrize("module", EXTRAS)
def test_the_extra_that_is_named_brings_the_package(module):
    if not (distributions := packages_distributions().get(module)):
        pytest.skip(f"{module} is not installed")
    assert {re.sub(r"[-_.]+", "-", name).lower() for name in distributions} & brought_by(EXTRAS[module])


def test_all_holds_every_extra_that_users_install():
    extras = PROJECT["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.extras == set(extras) - {"all", "test", "train"}
    assert all("neuclip[train]" in extras[name] for name in everything.extras)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed")
def test_the_wheel_holds_every_file_of_the_source_and_asks_for_three_packages(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        needed = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist: ")]
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert held == {name for name in files if "__pycache__" not in name}
    plain = {re.split(r"[>=]", line.split()[1])[0] for line in needed if "extra ==" not in line}
    assert plain == {"torch", "numpy", "pyyaml"}


def installs(target: str, folder: Path) -> list[str]:
    """The commands with which pip installs in a fresh checkout."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    printed = subprocess.run(["make", "--dry-run", target], cwd=folder, check=True, capture_output=True, text=True)
    return [line for line in printed.stdout.splitlines() if "pip install" in line]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_demo_installs_no_test_packages_and_pip_shows_its_progress(tmp_path):
    demo = installs("demo", tmp_path)
    assert len(demo) == 1 and demo[0].endswith("-e '.[demo]'")
    for target in ("install", "check", "test", "bench", "picture"):
        both = installs(target, tmp_path)
        assert both[0] == demo[0] and len(both) == 2 and both[1].endswith("-e '.[test]'"), target
    assert not any("quiet" in line or " -q" in line for line in both)
