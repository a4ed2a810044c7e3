"""The model folder: complete or without a config, readable by others, and never a random model."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from neuclip.errors import RunFailed, UserError
from neuclip.models.config import SHIPPED
from neuclip.models.export import export_model
from neuclip.models.facts import model_facts
from neuclip.models.towers import build_model
from tests.builders.processes import run


def export_and_die(folder: Path, calls: int) -> None:
    """Killed after so many calls of functions; or else how many there were is printed."""
    made = 0

    def count(*_: object) -> None:
        nonlocal made
        made += 1
        if made > calls:
            os.kill(os.getpid(), signal.SIGKILL)

    built = build_model("tiny")
    sys.setprofile(count)
    export_model(built, folder)
    sys.setprofile(None)
    print(made)


@pytest.mark.slow
def test_a_folder_whose_export_was_killed_at_any_moment_is_whole_or_refused(tmp_path):
    total = int(run(export_and_die, tmp_path / "whole", 10**9).output)
    kinds = set()
    for part in range(5):
        folder = tmp_path / str(part)
        export_model(build_model("tiny"), folder)  # an older model, which the killed one was to replace
        old = (folder / "open_clip_config.json").read_text()
        (folder / "open_clip_config.json").write_text(old.replace('"embed_dim": 128', '"embed_dim": 64'))
        killed = run(export_and_die, folder, total - 6**part)  # dense near the end, where files are written
        assert killed.code == -signal.SIGKILL
        try:
            kinds.add(build_model(f"local-dir:{folder}").embed_dim)
        except UserError as error:
            assert "open_clip_config.json" in str(error)
            kinds.add("refused")
    assert "refused" in kinds and kinds <= {"refused", 128}


@pytest.mark.parametrize("use", [build_model, model_facts])
def test_a_folder_without_weights_is_no_model(use, tmp_path):
    export_model(build_model("tiny"), tmp_path)
    (tmp_path / "open_clip_model.safetensors").rename(tmp_path / "open_clip_model.safetensors.partial")
    with pytest.raises(UserError, match="no weights"):
        use(f"local-dir:{tmp_path}")


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_all_files_have_the_mode_that_new_files_have(mask, tmp_path):
    built, before = build_model("tiny"), os.umask(mask)
    try:
        export_model(built, tmp_path)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o666 & ~mask}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["open_clip_config.json", "open_clip_model.safetensors"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "open_clip_model.safetensors").mkdir()
    with pytest.raises(RunFailed, match="could not be written"):
        export_model(build_model("tiny"), tmp_path)


def test_a_tokenizer_of_transformers_is_saved_with_the_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nred\ncircle\n")
    transformers.BertTokenizerFast.from_pretrained(tmp_path / "words").save_pretrained(tmp_path / "words")
    config = json.loads((SHIPPED / "tiny.json").read_text())
    config["text_cfg"]["hf_tokenizer_name"] = str(tmp_path / "words")
    (tmp_path / "bert.json").write_text(json.dumps(config))
    built = build_model(str(tmp_path / "bert.json"))
    export_model(built, tmp_path / "model")
    again = build_model(f"local-dir:{tmp_path / 'model'}")
    assert torch.equal(again.tokenize(["a red circle"]), built.tokenize(["a red circle"]))
    assert built.tokenize(["a red circle"])[0, :6].tolist() == [2, 5, 6, 7, 3, 0]
