"""Commands in the README (with a tiny budget) and Python in README and docs/extending.md really run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from neuclip.cli.main import main
from neuclip.data.by_name import built_folder
from tests.builders.data import write_task
from tests.builders.images import write_shard, write_shards
from tests.builders.models import NORMS_FILE

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ("README.md", "docs/extending.md")

TINY_BUDGET = shlex.split(
    f"--train.samples 32 --train.batch_size 16 --model.name {NORMS_FILE} --evaluation.every 0 "
    "--evaluation.error_anchors 0 --evaluation.zero_shot none --data.workers 0 --run.threads 1"
)


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(document: str) -> list[list[str]]:
    lines = [line for block in blocks(document, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("neuclip ")]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_of_python_runs_as_it_stands(document):
    found = blocks(document, "python")
    assert found
    for block in found:
        exec(compile(block, document, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_every_command_of_the_readme_runs(tmp_path, monkeypatch):
    """In their order, in one folder: later ones use what earlier ones wrote to runs/NAME. Those that begin as one of
    docs/finetuning.md run there; the demo's data set is a small one, as if it had been prepared before."""
    monkeypatch.chdir(tmp_path)
    for part in ("train", "new-drawings", "new-concepts"):
        write_shards(built_folder("icons-30k") / part, 40)
    for shard in range(20):
        write_shard(tmp_path / "shards" / f"{shard:05d}.tar", range(shard * 4, shard * 4 + 4))
    write_task(tmp_path / "sets" / "wds_cifar10_test", classnames=[f"thing {number}" for number in range(10)])
    shown = commands("README.md")
    elsewhere = [command[:3] for command in commands("docs/finetuning.md")]
    assert {command[0] for command in shown} == {
        "train",
        "eval",
        "error",
        "report",
        "compare",
        "search",
        "recipe",
        "doctor",
        "data",
    }
    names = iter(("NAME", "OTHER", "third"))
    for command in shown:
        if command[:3] in elsewhere:
            continue
        if command[0] == "train" and "--resume" not in command:
            name = [] if "--run.name" in command else ["--run.name", next(names)]
            command = [*command, *TINY_BUDGET, *name]
        if command[0] == "doctor":  # its data holds 80 pairs here
            command = [*command, *TINY_BUDGET, "--run.name", "another"]
        assert main(command) == 0, command
    assert (tmp_path / "runs" / "NAME" / "report.html").is_file()
    assert sum(command[:3] in elsewhere for command in shown) == 2


def test_the_readme_shows_the_two_commands_and_its_image():
    assert "make demo" in README and "make test" in README
    for image in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / image).is_file(), image


def test_links_inside_the_project_lead_somewhere():
    for document in ["README.md", "CONTRIBUTING.md", *[f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]]:
        text = (ROOT / document).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            if "://" not in target:
                assert ((ROOT / document).parent / target).exists(), f"{document}: {target}"
