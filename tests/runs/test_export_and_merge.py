"""An exported or merged folder is whole, checked and described, or it is not there."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from neuclip import api
from neuclip.cli.main import main
from neuclip.errors import UserError
from neuclip.models.build import build_model
from neuclip.models.export import export_model, largest_difference
from neuclip.records import RunFolder, read_lines
from neuclip.runs.export import interpolate, public
from neuclip.runs.folder import checkpoints_in, samples_at
from neuclip.settings.reading import read_settings
from tests.builders.models import NORMS_FILE, build, inputs, timm_and_bert, write_bert
from tests.builders.processes import at_write, main_killed_at_write
from tests.builders.runs import assert_equal_weights, summary

pytestmark = pytest.mark.slow


def weights(target: str | Path) -> dict[str, torch.Tensor]:
    return api.load(str(target))[0].state_dict()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The folder of another model of the run's architecture."""
    folder = tmp_path_factory.mktemp("base") / "start"
    export_model(build_model(str(NORMS_FILE)), folder)
    return folder


def test_a_run_exported_by_command_encodes_as_before_and_is_described(copied, capsys):
    assert main(["export", str(copied.path), "--to", "open_clip"]) == 0
    folder, printed = copied.path / "open_clip", capsys.readouterr()
    said = printed.out.splitlines()[0]
    assert said.startswith(f"{folder}: features equal those of {copied.path} (1 - cosine at most ")
    assert float(said.split()[-1].rstrip(")")) < 1e-14 and f"hf upload NAME {folder}\n" in printed.err
    assert_equal_weights(weights(f"local-dir:{folder}"), weights(copied.path))
    card, figures = (folder / "README.md").read_text(), summary(copied.path)["evaluation"]
    recall = next(value for key, value in figures.items() if key.endswith("image_to_text_recall_at_1"))
    assert re.search(rf"\| image to text \| [^|]+ \| {100 * recall:.1f} % \(chance", card)
    assert "| objective.name | neuclip |" in card and "| pairs | 40 |" in card and "| train.batch_size | 8 |" in card
    assert card.startswith("---\nlibrary_name: open_clip\n") and "## Licence\n\nNot chosen yet." in card
    assert str(copied.path.parent) not in card and "/shapes" not in card  # no folder of this machine
    assert "data.workers" not in card  # which does not matter to anybody else


@torch.no_grad()
@pytest.mark.parametrize("form", ["open_clip", "onnx"])
def test_the_code_on_the_card_loads_a_pair_from_elsewhere_from_its_folder_alone(form, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript", reason="needs the extra `export`")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    bert = write_bert(tmp_path / "bert")
    built, folder = build(tmp_path, timm_and_bert(bert)), tmp_path / "out"
    export_model(built, tmp_path / "start")
    shutil.rmtree(bert)
    assert main(["export", f"local-dir:{tmp_path / 'start'}", "--to", form, str(folder)]) == 0
    card = (folder / "README.md").read_text()
    assert "Unknown: this model was made from weights alone." in card
    code = card.split("```")[1].removeprefix("python\n").replace("FOLDER", str(folder))
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


def test_the_card_of_a_checkpoint_has_the_figures_of_that_moment_or_none(copied, tmp_path):
    checkpoint, last = checkpoints_in(copied)[0], read_lines(copied.evaluation)[-1]
    cards = []
    for samples in (last["samples"], samples_at(checkpoint)):
        copied.evaluation.write_text(json.dumps(last | {"samples": samples}) + "\n")
        folder = tmp_path / str(samples)
        assert main(["export", str(checkpoint), "--to", "open_clip", str(folder)]) == 0
        cards.append((folder / "README.md").read_text())
    assert ["recall@1" in card for card in cards] == [False, True]
    assert all(f"| samples seen | {samples_at(checkpoint)} |" in card for card in cards)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["local-dir:{run}/model"], "give the folder to write as the last argument"),
        (["{run}", "/proc/x"], "/proc/x: cannot be written ("),
        (["{run}", "n" * 300], "cannot be written (File name too long)"),
        (["{run}", "{run}/model"], "model exists; give another folder"),
    ],
)
def test_a_failed_export_is_one_line_and_changes_no_file(copied, capsys, arguments, message):
    before = {path: path.stat().st_mtime_ns for path in copied.path.rglob("*")}
    given = [argument.format(run=copied.path) for argument in arguments]
    assert main(["export", given[0], "--to", "open_clip", *given[1:]]) == 2
    assert message in (stderr := capsys.readouterr().err) and stderr.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in copied.path.rglob("*")} == before


def test_an_export_that_fails_its_check_leaves_nothing(finished, base, tmp_path, capsys):
    (tmp_path / "out").mkdir()

    def exchange() -> None:
        (file,) = (tmp_path / "out").rglob("*open_clip_model*")
        file.write_bytes((base / "open_clip_model.safetensors").read_bytes())

    with at_write("open_clip_model", exchange, nth=2):  # safetensors writes a file of its own in place of the first
        assert main(["export", str(finished.path), "--to", "open_clip", str(tmp_path / "out" / "model")]) == 1
    assert "gives other features" in capsys.readouterr().err and list((tmp_path / "out").iterdir()) == []


def test_after_an_export_killed_at_any_write_the_run_can_be_resumed(copied):
    writes = 0
    while main_killed_at_write(writes + 1, ["export", str(copied.path), "--to", "open_clip"]).code == -9:
        writes += 1
        assert not (copied.path / "open_clip").exists()
    assert writes >= 3 and (copied.path / "open_clip" / "README.md").exists()
    assert api.train(read_settings(copied.settings), resume=copied.path) == copied.path
    assert main(["eval", str(copied.path)]) == main(["report", str(copied.path)]) == 0


def test_addresses_on_a_card_lose_their_folders_and_secrets():
    assert public("icons-30k,/home/me/photos.csv:2") == "icons-30k,photos.csv:2"
    assert public("https://user:secret@host/a.tar?sign=1") == "https://***@host/a.tar"
    assert public("local-dir:/home/me/model") == "model"
    assert public(("/home/me/x", "y")) == "x, y"


# --- Merging


@pytest.mark.parametrize("weight", ["0", "0.25", "1"])
def test_a_merged_model_is_the_weighted_mean_of_both(finished, base, weight, tmp_path, capsys):
    folder, share = tmp_path / "merged", float(weight)
    assert main(["merge", f"local-dir:{base}", str(finished.path), str(folder), "--weight", weight]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"local-dir:{folder}\n" and "BatchNorm: its statistics are interpolated" in printed.err
    first, second, merged = map(weights, (f"local-dir:{base}", finished.path, f"local-dir:{folder}"))
    for name, tensor in merged.items():
        wanted = (1 - share) * first[name].double() + share * second[name].double()
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), wanted, rtol=1e-5, atol=1e-6)
    card = (folder / "README.md").read_text()
    assert f"{1 - share:g} of start and {share:g} of whole" in card and card.count("Not evaluated yet") == 1


def test_half_precision_is_merged_in_float32_and_integers_are_those_of_the_tuned_model():
    base = {"w": torch.tensor([1000.0, 0.1], dtype=torch.float16), "count": torch.tensor(3)}
    tuned = {"w": torch.tensor([1001.0, 0.3], dtype=torch.float16), "count": torch.tensor(7)}
    merged = interpolate(base, tuned, 0.25)
    assert merged["w"].tolist() == torch.tensor([1000.25, 0.15]).half().tolist() and merged["count"] == 7
    with pytest.raises(UserError, match="differ in 2 of their weights, the first is v"):
        interpolate(base | {"w": torch.zeros(3)}, tuned | {"v": torch.zeros(1)}, 0.5)


def test_the_curve_ends_at_the_figures_of_both_models_and_writes_no_model(copied, base, capsys):
    assert main(["merge", f"local-dir:{base}", str(copied.path), "--curve"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 12
    lines = read_lines(copied.merges)
    assert [line.pop("weight") for line in lines] == [step / 10 for step in range(11)]
    held_out = read_settings(copied.settings).evaluation.retrieval
    assert lines[0] == pytest.approx(api.evaluate(f"local-dir:{base}", retrieval=held_out, zero_shot=()), abs=1e-6)
    assert lines[10] == pytest.approx(api.evaluate(str(copied.path)), abs=1e-6)
    assert lines[5] != lines[0] and not list(copied.path.glob("merged*"))


@pytest.mark.parametrize(
    ("other", "mean", "what"),
    [
        ({"model": str(NORMS_FILE), "image_size": 48}, None, "preprocessing.size"),
        ({"model": "small"}, None, "embed_dim"),
        ({"model": str(NORMS_FILE)}, (0.5, 0.5, 0.5), "preprocessing.mean"),
    ],
)
def test_another_architecture_or_preprocessing_is_refused(finished, other, mean, what, tmp_path, capsys):
    built = build_model(**other)
    if mean:
        built.towers.model.visual.preprocess_cfg["mean"] = mean
    export_model(built, tmp_path / "other")
    assert main(["merge", f"local-dir:{tmp_path / 'other'}", str(finished.path), str(tmp_path / "out")]) == 2
    assert f"differ in {what}" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_run_with_lora_is_merged_as_the_plain_model_that_it_saved(finished, train, tmp_path):
    flags = ["--model.text_tower", "lora", "--optimizer.learning_rate", "0.01"]
    adapted: RunFolder = train("--model.pretrained", str(finished.path), *flags)
    assert main(["merge", str(finished.path), str(adapted.path), str(tmp_path / "half")]) == 0
    base, saved, half = map(weights, (finished.path, f"local-dir:{adapted.model}", f"local-dir:{tmp_path}/half"))
    name = "transformer.resblocks.0.attn.in_proj_weight"
    assert not torch.equal(saved[name], base[name])
    torch.testing.assert_close(half[name], (base[name] + saved[name]) / 2)
