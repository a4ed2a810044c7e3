"""An exported folder is whole, checked and described, or it is not there."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from neuclip.cli.main import main
from neuclip.errors import RunFailed, UserError
from neuclip.models import formats
from neuclip.models.export import export_model
from neuclip.models.formats import Format, largest_difference
from neuclip.models.towers import build_model
from neuclip.records import RunFolder, read_lines
from neuclip.runs.checkpoint import checkpoints_in
from neuclip.runs.export import export, pairs_of_gallery
from neuclip.runs.model_card import model_card, public
from neuclip.runs.target import open_target
from tests.builders.models import NORMS_FILE, build, inputs, timm_and_bert, write_bert

pytestmark = pytest.mark.slow


@pytest.fixture
def run(finished, tmp_path) -> RunFolder:
    """A copy of the finished run, to write into."""
    return RunFolder(shutil.copytree(finished.path, tmp_path / "whole"))


def test_a_run_exported_by_command_encodes_as_before_and_is_described(run, capsys):
    assert main(["export", str(run.path), "--to", "open_clip"]) == 0
    folder = run.path / "open_clip"
    said = capsys.readouterr().out
    assert said.startswith(f"{folder}: features equal those of {run.path} (1 - cosine at most ")
    assert float(said.split()[-1].rstrip(")")) < 1e-14
    ours, theirs = open_target(str(run.path))[0], open_target(f"local-dir:{folder}")[0]
    for name, tensor in ours.towers.model.state_dict().items():
        assert torch.equal(tensor, theirs.towers.model.state_dict()[name])
    card = (folder / "README.md").read_text()
    figures = json.loads(run.summary.read_text())["evaluation"]
    recall = next(value for key, value in figures.items() if key.endswith("image_to_text_recall_at_1"))
    assert re.search(rf"\| image to text \| [^|]+ \| {100 * recall:.1f} % \(chance", card)
    assert "| method | NeuCLIP |" in card and "| pairs | 40 |" in card and "| batch size | 8 |" in card
    assert card.startswith("---\nlibrary_name: open_clip\n") and "## Licence\n\nNot chosen yet." in card
    assert str(run.path.parent) not in card and "/shapes" not in card  # no folder of this machine


@torch.no_grad()
@pytest.mark.parametrize("form", ["open_clip", "onnx"])
def test_the_code_on_the_card_loads_a_pair_from_elsewhere_from_its_folder_alone(form, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript", reason="needs the extra `export`")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    bert = write_bert(tmp_path / "bert")
    built = build(tmp_path, timm_and_bert(bert))
    export_model(built, tmp_path / "start")
    shutil.rmtree(bert)
    folder = tmp_path / "out"
    assert export(f"local-dir:{tmp_path / 'start'}", form, folder) < 1e-6
    code = (folder / "README.md").read_text().split("```")[1].removeprefix("python\n").replace("FOLDER", str(folder))
    pixels, tokens = inputs(built)
    names: dict[str, Any] = {"pixels": pixels.numpy()}
    exec(code.replace("a photo of a dog", "a red circle"), names)
    if form == "open_clip":
        model = names["model"].eval()
        names |= {"image": model.encode_image(pixels, normalize=True)}
        names |= {"text": model.encode_text(names["tokenizer"](["a red circle"]), normalize=True)}
    towers = built.towers.eval()
    assert largest_difference(towers.encode_image(pixels), torch.as_tensor(names["image"])) < 1e-6
    assert largest_difference(towers.encode_text(tokens[:1]), torch.as_tensor(names["text"])) < 1e-6


def test_the_check_sees_the_runs_own_images_and_captions(finished):
    shown = list(pairs_of_gallery(str(finished.path)))
    assert len(shown) == 8 and all(image.size[0] > 8 and caption.startswith("a ") for image, caption in shown)
    assert list(pairs_of_gallery("local-dir:elsewhere")) == []


def test_the_card_of_a_checkpoint_has_the_figures_of_that_moment_or_none(run):
    built, _ = open_target(str(run.path))
    last = read_lines(run.evaluation)[-1]
    checkpoint = checkpoints_in(run.checkpoints)[0]
    samples = int(checkpoint.stem.removeprefix("samples-"))
    assert samples not in {line["samples"] for line in read_lines(run.evaluation)}
    assert "Not measured at this point" in model_card(str(checkpoint), built, "onnx", 0.0)
    run.evaluation.write_text(json.dumps(last | {"samples": samples}) + "\n")
    assert "recall@1" in model_card(str(checkpoint), built, "onnx", 0.0)


def test_an_existing_folder_is_refused_and_untouched(run, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="taken exists; give another folder"):
        export(str(run.path), "open_clip", tmp_path / "taken")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["mine.txt"]


def test_an_export_that_fails_its_check_leaves_nothing(run, tmp_path, monkeypatch):
    other = build_model(str(NORMS_FILE))
    wrong = Format(lambda built, folder: export_model(other, folder), formats.encode_with_open_clip)
    monkeypatch.setitem(formats.FORMATS, "open_clip", wrong)
    (tmp_path / "out").mkdir()
    with pytest.raises(RunFailed, match="gives other features"):
        export(str(run.path), "open_clip", tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_model_that_is_no_run_needs_to_be_told_where_to_write(run, capsys):
    assert main(["export", f"local-dir:{run.model}", "--to", "open_clip"]) == 2
    assert "say where to write, as the last argument" in capsys.readouterr().err


def test_addresses_on_a_card_lose_their_folders_and_secrets():
    assert public("icons-30k,/home/me/photos.csv:2") == "icons-30k,photos.csv:2"
    assert public("https://user:secret@host/a.tar?sign=1") == "https://***@host/a.tar"
    assert public("local-dir:/home/me/model") == "model"
    assert public(str(Path("here") / "x")) == "here/x"
