"""What the documents say is so: Python blocks and commands run, links lead somewhere, the reference is up to date."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from socketserver import ThreadingTCPServer

import pytest

from neuclip.cli.main import COMMANDS, main
from neuclip.data.by_name import built_folder
from tests.builders.data import write_task
from tests.builders.images import caption, image_bytes, photo, write_csv, write_shard, write_shards
from tests.builders.models import SMALL_FILE

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    str(path.relative_to(ROOT)) for pattern in ("*.md", "docs/*.md", "examples/*.md") for path in ROOT.glob(pattern)
)
BLOCK = r"^```{}\n(.*?)^```"

QUICK = shlex.split(
    "--train.samples 32 --train.batch_size 16 --data.hold_out 4 --data.workers 0 --run.threads 1 "
    "--evaluation.every 0 --evaluation.error_anchors 0 --evaluation.zero_shot none"
)
SMALL = ["--model.name", str(SMALL_FILE)]
PAIR = ["--model.image_size", "64"]  # of the pretrained towers
ELSEWHERE = ("data get imagenet", "train --data.train 's3://")  # they need the network: tests/data/test_remote.py


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    return re.findall(BLOCK.format(language), text_of(document), flags=re.MULTILINE | re.DOTALL)


def commands(*documents: str) -> dict[str, None]:
    """The different commands of neuclip, in their order; those of torchrun as one rank would run them."""
    lines = [line for document in documents for block in blocks(document, "sh") for line in block.splitlines()]
    shown = [re.sub(r"^torchrun .* -m neuclip ", "neuclip ", line) for line in lines]
    words = [shlex.join(shlex.split(line, comments=True)[1:]) for line in shown if line.startswith("neuclip ")]
    return dict.fromkeys(words)


@pytest.mark.parametrize("document", ["README.md", "docs/extending.md"])
def test_every_block_of_python_runs_as_it_stands(document):
    found = blocks(document, "python")
    assert found
    for block in found:
        exec(compile(block, document, "exec"), {"__name__": "__main__"})


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The data that the documents speak of, with 24 to 40 pairs each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ThreadingTCPServer, "serve_forever", lambda page: None)  # a search page ends at once
    for part in ("train", "new-drawings", "new-concepts"):
        write_shards(built_folder("icons-30k") / part, 24)
    for shard in range(20):
        write_shard(tmp_path / "shards" / f"{shard:05d}.tar", (2 * shard, 2 * shard + 1))
    for kind in ("MY_PHOTOS", "PHOTOS", "photos/red", "photos/blue"):
        (tmp_path / kind).mkdir(parents=True)
        for number in range(36 if "/" not in kind else 12):
            (tmp_path / kind / f"{number}.png").write_bytes(image_bytes(number))
            (tmp_path / kind / f"{number}.txt").write_text(f"{caption(number)} {number}")
    for part in ("PHOTOS/fashion/train", "PHOTOS/fashion/test", "MY_DATA/train", "MY_DATA/test"):
        (tmp_path / part).mkdir(parents=True)
    write_csv(tmp_path, 24)
    (tmp_path / "bicycle.jpg").write_bytes(photo(0))
    shutil.copy("pairs.csv", "val.csv")
    shutil.copytree("shards", "wds_flickr30k")
    shutil.copytree("shards", "cc3m")
    write_task(tmp_path / "sets" / "wds_cifar10_test", classnames=[f"thing {number}" for number in range(10)])
    return tmp_path


def make_runs() -> None:
    """The runs that commands name: one training of each objective, and copies of it."""
    names = {"neuclip": ("NAME", "neuclip", "neuclip-1", "first"), "clip": ("OTHER", "clip", "clip-1", "second")}
    for objective, (trained, *copies) in names.items():
        assert main(["train", "--objective", objective, "--run.name", trained, *SMALL, *QUICK]) == 0
        for name in copies:
            shutil.copytree(f"runs/{trained}", f"runs/{name}")


def as_run_here(command: str) -> Iterator[str]:
    """A shown command as a shell would give it, with flags that make it quick."""
    words = shlex.split(command)
    for word in words[: words.index(">")] if ">" in words else words:
        yield from sorted(str(path) for path in Path().glob(word)) if "runs/" in word and "*" in word else [word]
    if words[0] == "experiment" and not {"--list", "paper"} & set(words):
        yield "--pages-only"  # tests/experiments runs one
    if words[0] in ("train", "doctor") and "--resume runs/NAME" not in command:
        yield from QUICK
        yield from PAIR if "locked" in words else () if "finetune" in words else SMALL
        yield from () if "--run.name" in words else ("--run.name", f"run-{len(list(Path('runs').iterdir()))}")


@pytest.mark.slow
def test_every_command_runs_as_it_is_shown(folder, capsys):
    make_runs()
    shown = commands("README.md", "docs/guide.md", "docs/data.md")
    assert {command.split()[0] for command in shown} == {name.split()[0] for name in COMMANDS}
    for command in shown:
        if command.startswith(ELSEWHERE):
            continue
        capsys.readouterr()
        code = main(list(as_run_here(command)))
        printed = capsys.readouterr()
        assert code == 0, f"{command}\n{printed.err}"
        if ">" in shlex.split(command):
            Path(shlex.split(command)[-1]).write_text(printed.out)
        if command.startswith("train locked"):
            search = f"Search: neuclip search runs/photos {folder / 'MY_PHOTOS'} 'your words'"
            assert printed.out.strip().splitlines()[-1] == search


def test_the_readme_shows_the_two_commands_and_its_picture():
    readme = text_of("README.md")
    assert "make demo" in readme and "make test" in readme
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", readme)
    assert pictures and all((ROOT / picture).is_file() for picture in pictures)


def anchors(document: Path) -> set[str]:
    """The names under which GitHub knows a page's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_inside_the_project_lead_somewhere(document):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text_of(document)):
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (ROOT / document).parent / target if target else ROOT / document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_the_reference_is_up_to_date(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    made = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["page"]()
    assert made == text_of("docs/reference.md"), "run: python scripts/reference.py"
