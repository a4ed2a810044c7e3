"""Fine-tuning: from a run, a checkpoint or a folder; towers locked or adapted; a temperature that is kept."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from neuclip import api
from neuclip.distributed.ranks import StopRequest
from neuclip.errors import UserError
from neuclip.models.export import export_model
from neuclip.models.towers import build_model
from neuclip.records import RunFolder, read_lines
from neuclip.runs.build import build_towers
from neuclip.runs.folder import checkpoints_in, load_checkpoint
from neuclip.runs.lifecycle import start_run
from neuclip.runs.pretrained import resolve_model
from neuclip.training.loop import train
from tests.builders.models import NORMS_FILE, TRANSFORMERS
from tests.builders.runs import BATCH, losses

SHORT = ["--train.samples", str(4 * BATCH), "--checkpoint.every_samples", str(2 * BATCH)]


def weights_of(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_checkpoint(checkpoints_in(folder)[-1])["model"]


@pytest.mark.parametrize("kind", ["run", "checkpoint", "folder", "local-dir"])
@pytest.mark.parametrize("name", ["", str(NORMS_FILE)], ids=["no name", "its name"])
def test_a_run_a_checkpoint_or_a_folder_gives_its_weights(kind, name, finished, small_settings, tmp_path):
    pretrained = {
        "run": finished.path,
        "checkpoint": checkpoints_in(finished)[-1],
        "folder": finished.model,
        "local-dir": f"local-dir:{finished.model}",
    }[kind]
    settings = small_settings(tmp_path, f"--model.name={name}", "--model.pretrained", str(pretrained))
    settings = resolve_model(settings)
    built, want = build_towers(settings, torch.device("cpu")), weights_of(finished)
    assert built.has_trained_weights and settings.model.name
    assert all(torch.equal(x, want[name]) for name, x in built.towers.model.state_dict().items())


@pytest.mark.parametrize("kind", ["path", "model"])
def test_weights_of_another_architecture_are_one_line(kind, finished, small_settings, tmp_path):
    flags = ["--model.name", "small", "--model.pretrained", str(getattr(finished, kind))]
    with pytest.raises(UserError, match=r"another architecture than model.name small; give --model.name= \(empty\)"):
        build_towers(small_settings(tmp_path, *flags), torch.device("cpu"))


def test_an_empty_name_needs_a_model_to_take_it_from(small_settings, tmp_path):
    with pytest.raises(UserError, match=r"model.name is empty, and openai is no run.*give --model.name too"):
        resolve_model(small_settings(tmp_path, "--model.name=", "--model.pretrained", "openai"))
    with pytest.raises(UserError, match=r"no model to start from; give .*--model.pretrained runs/NAME"):
        resolve_model(small_settings(tmp_path, "--model.name="))


def test_a_temperature_below_the_minimum_and_a_bias_are_kept(small_settings, tmp_path):
    """SigLIP's 1/117: the limit of the temperature gives way, and the first step moves it by its rate at most."""
    built = build_model(str(NORMS_FILE), initial_bias=-12.9)
    torch.nn.init.constant_(built.towers.model.logit_scale, math.log(117))
    export_model(built, tmp_path / "siglip")
    flags = ["--objective", "clip", "--model.name=", "--model.pretrained", str(tmp_path / "siglip"), *SHORT]
    settings = resolve_model(small_settings(tmp_path, *flags, "--temperature.learning_rate", "0"))
    run = start_run(settings)
    train(run, StopRequest(), evaluate=lambda run: None, save=lambda run: None)
    assert run.built.towers.log_scale == torch.tensor(math.log(117)).item()
    assert run.built.towers.logit_bias.item() == torch.tensor(-12.9).item()
    assert run.optimizer.log_scale_range[0] == 0 < math.log(100) < run.optimizer.log_scale_range[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["locked", "lora"])
def test_what_does_not_train_is_equal_to_the_bit_and_a_killed_run_resumes_to_the_bit(mode, small_settings, tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(TRANSFORMERS))
    flags = ["--model.name", str(tmp_path / "small.json"), "--model.image_tower", mode, "--model.text_tower", mode]
    flags += ["--optimizer.layer_decay", "0.8", "--model.image_size", "0", "--optimizer.weight_decay", "0.5"]
    settings = small_settings(tmp_path, "--run.name", "run", *flags, *SHORT)
    run = start_run(settings)
    before = {name: x.clone() for name, x in run.built.towers.model.state_dict().items()}
    trained = {name for name, p in run.built.towers.model.named_parameters() if p.requires_grad}
    moments = sum(len(group["params"]) for group in run.optimizer.adamw.param_groups)
    assert moments == len(trained) < len(before)
    shutil.rmtree(run.folder.path)

    folder = RunFolder(api.train(settings))
    after, want = weights_of(folder), losses(folder.path)
    same = {name for name, x in after.items() if torch.equal(x, before[name])}
    assert same == before.keys() - trained
    model = build_model(f"local-dir:{folder.model}")
    assert not any("parametrizations" in name for name in model.towers.model.state_dict())
    assert (folder.model / "lora.safetensors").exists() == (mode == "lora")

    checkpoints_in(folder)[-1].unlink()
    api.train(settings, resume=folder.path)
    assert losses(folder.path) == want
    assert all(torch.equal(x, after[name]) for name, x in weights_of(folder).items())


@pytest.mark.slow
def test_the_recipe_finetune_shows_what_the_model_knew_before(finished, shards, tmp_path, capsys):
    from neuclip.cli.main import main

    flags = f"""--data.train {shards} --data.hold_out 8 --data.workers 0 --run.folder {tmp_path} --run.name child
        --model.pretrained {finished.path} --train.batch_size 8 --train.samples 16 --objective.num_prototypes 20
        --evaluation.every 0 --run.threads 1""".split()
    assert main(["train", "finetune"]) == 2
    assert "no training data; give captioned images: --data.train" in capsys.readouterr().err
    assert main(["train", "finetune", *flags]) == 0
    printed = capsys.readouterr()
    assert "Before training:" in printed.out and f"cpu), from {finished.path}" in printed.err
    folder = RunFolder(tmp_path / "child")
    assert [record["samples"] for record in read_lines(folder.evaluation)] == [0, 16]
    summary = json.loads(folder.summary.read_text())
    assert summary["evaluation_at_start"].keys() == summary["evaluation"].keys()
