"""Whatever names a model is found on this machine, measured, and trained further: whole, locked, or with LoRA."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from neuclip import api
from neuclip.cli.main import main
from neuclip.errors import RunFailed, RunInterrupted, UserError
from neuclip.models.build import build_model
from neuclip.models.export import export_model
from neuclip.records import RunFolder, read_lines
from neuclip.runs.folder import checkpoints_in, load_checkpoint
from tests.builders.models import NORMS_FILE, TRANSFORMERS, timm_and_bert, write_bert
from tests.builders.processes import at_write
from tests.builders.runs import BATCH, assert_equal_runs, assert_equal_weights, last_checkpoint, summary, weights

SHORT = ["--train.samples", str(BATCH)]


def weights_at_start(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_checkpoint(checkpoints_in(run)[0])["model"]


# --- Names


@pytest.mark.parametrize("target", ["hf-hub:someone/small", "ViT-B-32-quickgelu:openai"])
def test_a_tag_or_the_hub_is_a_request_unless_the_hub_is_switched_off(target, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RunFailed, match=f"{target} is not on this machine; to download it set HF_HUB_OFFLINE=0"):
        api.load(target)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("NOTHING", "no run, checkpoint or model NOTHING"),
        ("vit-b-32", "no run, checkpoint or model vit-b-32; did you mean .*ViT-B-32"),
        ("tiny", "tiny names a model without weights; give tiny:TAG or tiny:FILE"),
        ("ViT-B-32:openay", "openay is neither a file nor a tag of ViT-B-32; .* such as openai"),
        ("nothing:openai", "nothing is not known"),
        ("{}/weights.pt", "is not a checkpoint of a run; give MODEL:"),
        ("{}/weights.safetensors", "is not a checkpoint of a run; give MODEL:"),
    ],
)
def test_a_target_that_cannot_be_opened_has_an_error_of_its_own(target, message, tmp_path):
    for name in ("weights.pt", "weights.safetensors"):
        torch.save({}, tmp_path / name)
    with pytest.raises(UserError, match=message):
        api.load(target.format(tmp_path))


@pytest.mark.parametrize("name", ["", str(NORMS_FILE)], ids=["no name", "its name"])
@pytest.mark.parametrize("kind", ["run", "checkpoint", "folder", "local-dir"])
def test_a_run_starts_with_the_weights_of_a_run_a_checkpoint_or_a_folder(kind, name, finished, train):
    checkpoint = str(checkpoints_in(finished)[-1])
    places = {"run": str(finished.path), "checkpoint": checkpoint, "folder": str(finished.model)}
    pretrained = places.get(kind, f"local-dir:{finished.model}")
    run = train(f"--model.name={name}", "--model.pretrained", pretrained, *SHORT)
    assert_equal_weights(weights_at_start(run), weights(finished.path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model.name small --model.pretrained {run}", "another architecture than model.name small .*--model.name= "),
        ("--model.name small --model.pretrained {run}/model", "another architecture than model.name small .*; give"),
        ("--model.name= --model.pretrained openai", "name is empty, but openai is not a run.*give --model.name too"),
        ("--model.name=", "no model to start from; give .*--model.pretrained runs/NAME"),
    ],
)
def test_weights_that_do_not_fit_and_a_model_without_a_name_are_one_line(flags, message, finished, train, tmp_path):
    with pytest.raises(UserError, match=message):
        train(*flags.format(run=finished.path).split())
    assert not (tmp_path / "runs").exists()


# --- What a start brings along


def test_sizes_of_the_settings_are_those_of_the_model(train):
    run = train("--model.image_size", "64", "--model.context_length", "12", *SHORT)
    model, _, tokenize = api.load(str(run.path))
    assert model.visual.image_size in (64, (64, 64)) and tokenize(["a " * 50]).shape == (1, 12)


@pytest.mark.parametrize("objective", ["clip", "siglip"])
def test_a_temperature_below_the_minimum_is_kept_and_a_bias_only_learns_where_it_is_used(objective, train, tmp_path):
    """SigLIP's 1/117: the limit of the temperature gives way. A softmax has no use for the bias."""
    built = build_model(str(NORMS_FILE), initial_bias=-12.9)
    torch.nn.init.constant_(built.towers.model.logit_scale, math.log(117))
    export_model(built, tmp_path / "siglip")
    flags = ["--objective", objective, "--model.name=", "--model.pretrained", str(tmp_path / "siglip")]
    state = last_checkpoint(train(*flags, "--temperature.learning_rate", "0").path)
    assert state["model"]["logit_scale"] == torch.tensor(math.log(117))
    assert (state["model"]["logit_bias"] == torch.tensor(-12.9)) == (objective == "clip")
    trained = sum(len(group["params"]) for group in state["optimizer"]["adamw"]["param_groups"])
    assert trained == len([*built.towers.model.parameters()]) - (objective == "clip")


@pytest.mark.parametrize(("objective", "bias"), [("clip", None), ("siglip", -10.0)])
def test_only_siglip_begins_with_a_bias_and_both_at_the_temperature_of_the_settings(objective, bias, train):
    start = weights_at_start(train("--objective", objective, "--temperature.initial", "0.05", *SHORT))
    assert start.get("logit_bias") == (None if bias is None else torch.tensor(bias))
    assert start["logit_scale"].exp().item() == pytest.approx(20)


@pytest.mark.slow
def test_the_recipe_finetune_evaluates_the_model_before_training(finished, shards, tmp_path, capsys):
    flags = f"""--data.train {shards} --data.hold_out 8 --data.workers 0 --run.folder {tmp_path} --run.name child
        --model.pretrained {finished.path} --train.batch_size 8 --train.samples 16 --objective.num_prototypes 20
        --evaluation.every 0 --run.threads 1""".split()
    assert main(["train", "finetune"]) == 2
    assert "no training data; give captioned images: --data.train" in capsys.readouterr().err
    assert main(["train", "finetune", *flags]) == 0
    printed = capsys.readouterr()
    assert "Before training:" in printed.out and f"cpu), from {finished.path}" in printed.err
    assert [record["samples"] for record in read_lines(RunFolder(tmp_path / "child").evaluation)] == [0, 16]
    assert summary(tmp_path / "child")["evaluation_at_start"].keys() == summary(tmp_path / "child")["evaluation"].keys()


# --- Without what it was made from


def test_a_checkpoint_needs_none_of_the_files_that_its_model_was_made_from(train, tmp_path):
    """From its first step on, also where the tokenizer and the text tower are of transformers."""
    bert = write_bert(tmp_path / "bert")
    (tmp_path / "mine.json").write_text(json.dumps(timm_and_bert(bert)))
    stop = at_write(f"samples-{0:012d}", lambda: signal.raise_signal(signal.SIGTERM))
    with stop, pytest.raises(RunInterrupted, match="saved at 0 of"):
        train("--model.name", str(tmp_path / "mine.json"), "--model.image_size", "0")
    model, _, tokenize = api.load(str(tmp_path / "runs" / "r"))
    tokens = tokenize(["a red circle"])
    shutil.rmtree(bert)
    (tmp_path / "mine.json").unlink()
    opened, _, again = api.load(str(tmp_path / "runs" / "r"))
    assert torch.equal(again(["a red circle"]), tokens)
    with torch.no_grad():
        assert torch.equal(opened.encode_text(tokens), model.encode_text(tokens))


@pytest.mark.slow
def test_a_fine_tuned_run_is_evaluated_and_resumed_from_another_folder_without_its_parent(
    train, shards, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(shards, "photos")
    export_model(build_model(str(NORMS_FILE), image_size=48, initial_bias=-5.0), Path("parent"))
    flags = "--data.train photos --evaluation.retrieval photos --model.name local-dir:parent --model.image_size 0"
    run = train("--objective", "clip", *flags.split(), *SHORT)
    want = summary(run.path)["evaluation"]
    shutil.rmtree("parent")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    assert main(["eval", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == want and f"{tmp_path}/photos.images" in want
    shutil.rmtree(run.model)
    assert main(["train", "--resume", str(run.path)]) == 0
    assert api.evaluate(f"local-dir:{run.model}", retrieval=(f"{tmp_path}/photos",), zero_shot=()) == want


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["locked", "lora", "train"])
def test_locked_weights_stay_equal_to_the_bit_and_a_run_resumes_to_the_bit(mode, train, tmp_path):
    """Where the image tower trains it drops patches, which random numbers choose."""
    (tmp_path / "small.json").write_text(json.dumps(TRANSFORMERS))
    flags = f"""--model.name {tmp_path / "small.json"} --model.image_tower {mode} --model.text_tower {mode}
        --optimizer.layer_decay 0.8 --model.image_size 0 --optimizer.weight_decay 0.5 --checkpoint.keep 9""".split()
    run = train(*flags)
    before, after = weights_at_start(run), weights(run.path)
    learned = {name for name, x in after.items() if not torch.equal(x, before[name])}
    added = {name for name in after if name.endswith((".a", ".b"))}  # of LoRA
    heads = {"logit_scale", "visual.proj", "text_projection"}
    assert learned == (before.keys() if mode == "train" else heads | added) and bool(added) == (mode == "lora")
    assert len(last_checkpoint(run.path)["optimizer"]["adamw"]["state"]) == len(learned)
    exported = build_model(f"local-dir:{run.model}").towers
    assert_equal_weights(exported.model.state_dict(), api.load(str(run.path))[0].state_dict())  # LoRA merged
    assert not any("parametrizations" in name for name in exported.model.state_dict())
    whole = shutil.copytree(run.path, tmp_path / "whole")
    for late in checkpoints_in(run)[2:]:
        late.unlink()
    train(*flags, resume="auto")
    assert_equal_runs(run.path, whole)
