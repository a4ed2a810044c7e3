"""Models: any open_clip name, shipped configs, own configs; one real NeuCLIP step for each of the paper's encoders."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from neuclip import NeuCLIP
from neuclip.errors import RunFailed, UserError
from neuclip.models import open_clip_module
from neuclip.models.config import SHIPPED
from neuclip.models.export import export_model
from neuclip.models.pixels import normalize_batch
from neuclip.models.torchvision_guard import guard_torchvision
from neuclip.models.towers import BuiltModel, build_model, encode_once
from neuclip.runs.build import build_towers
from neuclip.settings.reading import read_settings


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_shipped_model_gives_unit_rows_of_its_embedding_width(name):
    built = build_model(name)
    images = torch.stack([built.transform(Image.new("RGB", (70, 50), "red"))] * 2)
    assert images.dtype == torch.uint8
    image, text, *_ = built.towers(images, built.tokenize(["a red thing", "a very long caption " * 40]))
    assert image.shape == text.shape == (2, built.embed_dim)
    assert torch.allclose(torch.cat([image, text]).norm(dim=1), torch.ones(4), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RN50", "ViT-B-32", "ViT-B-16"])
def test_the_papers_encoders_take_a_neuclip_step(name):
    built = build_model(name, image_size=64)
    objective = NeuCLIP(built.embed_dim, num_prototypes=8, inner_steps=2)
    images = torch.randn(4, 3, 64, 64)
    image, text, *_ = built.towers(images, built.tokenize(["a cat", "a dog", "a bird", "a fish"]))
    loss = objective(image, text, built.towers.logit_scale)
    loss.backward()
    missing = [n for n, p in built.towers.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert torch.isfinite(loss) and missing == []


def test_the_model_folder_loads_with_open_clip_and_gives_the_same_features(tmp_path):
    built = build_model("tiny")
    export_model(built, tmp_path / "model")
    model, _, transform = open_clip_module().create_model_and_transforms(f"local-dir:{tmp_path / 'model'}")
    original = Image.effect_noise((60, 40), 80)
    assert torch.equal(transform(original), built.float_transform(original))
    with torch.no_grad():
        want = built.towers.eval().encode_image(built.transform(original)[None])
        got = model.eval().encode_image(transform(original)[None], normalize=True)
    assert torch.allclose(got, want, atol=1e-6)
    again = build_model(f"local-dir:{tmp_path / 'model'}")
    assert again.embed_dim == built.embed_dim and again.image_size == built.image_size


@pytest.mark.parametrize("name", ["tiny", "RN50"])
def test_bytes_normalized_as_a_batch_are_open_clips_floats_to_the_bit(name):
    """Also for the training transform, whose crop is drawn from torch's generator."""
    open_clip = open_clip_module()
    built = build_model(name, crop_scale=(0.5, 1.0))
    originals = [Image.effect_noise(size, 90) for size in ((64, 64), (50, 90))]
    train_transform = open_clip.image_transform(built.image_size, is_train=True, aug_cfg={"scale": (0.5, 1.0)})
    for ours, theirs in ((built.transform, built.float_transform), (built.train_transform, train_transform)):
        torch.manual_seed(3)
        want = torch.stack([theirs(original) for original in originals])
        torch.manual_seed(3)
        images = torch.stack([ours(original) for original in originals])
        assert torch.equal(normalize_batch(images, built.towers.mean, built.towers.std), want)


def test_a_model_config_of_ones_own_is_built_from_its_path(tmp_path):
    config = json.loads((SHIPPED / "tiny.json").read_text()) | {"embed_dim": 40}
    (tmp_path / "mine.json").write_text(json.dumps(config))
    assert build_model(str(tmp_path / "mine.json")).embed_dim == 40


def test_pretrained_weights_are_loaded_from_a_file(tmp_path):
    trained = build_model("tiny")
    torch.save({"state_dict": trained.towers.model.state_dict()}, tmp_path / "weights.pt")
    built = build_model("tiny", pretrained=str(tmp_path / "weights.pt"))
    for name, tensor in trained.towers.model.state_dict().items():
        assert torch.equal(tensor, built.towers.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ViT-B32", "ViT-B-32"),
        ("tinny", "tiny"),
        ("local-dir:nowhere", "open_clip_config.json"),
        ("nowhere.json", "no such file"),
    ],
)
def test_an_unknown_model_names_what_was_probably_meant(name, message):
    with pytest.raises(UserError, match=message):
        build_model(name)


def test_the_guard_is_harmless_when_called_again():
    first = guard_torchvision()
    assert guard_torchvision() == first
    import torchvision

    assert torchvision.__version__


def test_a_model_has_a_bias_only_where_one_is_asked_for():
    assert build_model("tiny").towers.logit_bias is None
    assert "logit_bias" not in build_model("tiny").towers.model.state_dict()
    assert build_model("tiny", initial_bias=-7.0).towers.logit_bias.item() == -7


def test_an_exported_bias_is_loaded_strictly_by_open_clip_and_by_us(tmp_path):
    built = build_model("tiny", initial_bias=-10.0)
    torch.nn.init.constant_(built.towers.logit_bias, -6.5)  # as training would leave it
    export_model(built, tmp_path)
    assert json.loads((tmp_path / "open_clip_config.json").read_text())["model_cfg"]["init_logit_bias"] == -10
    model, _, _ = open_clip_module().create_model_and_transforms(f"local-dir:{tmp_path}")
    assert model.logit_bias.item() == -6.5
    assert all(torch.equal(model.state_dict()[name], x) for name, x in built.towers.model.state_dict().items())
    for asked in (None, -10.0):  # to be evaluated, and to be trained further
        assert build_model(f"local-dir:{tmp_path}", initial_bias=asked).towers.logit_bias.item() == -6.5


@pytest.mark.parametrize("way", ["local-dir", "pretrained"])
def test_weights_without_a_bias_get_the_one_asked_for(way, tmp_path):
    built = build_model("tiny")
    export_model(built, tmp_path)
    torch.save(built.towers.model.state_dict(), tmp_path / "weights.pt")
    name, weights = (f"local-dir:{tmp_path}", "") if way == "local-dir" else ("tiny", str(tmp_path / "weights.pt"))
    again = build_model(name, pretrained=weights, initial_bias=-8.0)
    assert again.towers.logit_bias.item() == -8
    assert torch.equal(again.towers.model.text_projection, built.towers.model.text_projection)


@pytest.fixture
def hub_model(tmp_path, monkeypatch) -> str:
    """A model in huggingface_hub's cache, as a download leaves it, with a temperature and a bias of its own."""
    from huggingface_hub import constants

    snapshot = tmp_path / "hub" / "models--somebody--clip" / "snapshots" / ("0" * 40)
    built = build_model("tiny", initial_bias=-10.0)
    built.towers.set_temperature(0.02)
    torch.nn.init.constant_(built.towers.logit_bias, -6.5)
    export_model(built, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return "hf-hub:somebody/clip"


def build_for_training(name: str, *more: str) -> BuiltModel:
    settings = read_settings(None, ["--model.name", name, "--objective.name", "siglip", *more])
    return build_towers(settings, torch.device("cpu"))


@pytest.mark.parametrize("way", ["hf-hub", "local-dir", "pretrained"])
def test_trained_weights_keep_their_temperature_and_bias(way, hub_model, tmp_path):
    (file,) = tmp_path.rglob("*.safetensors")
    built = {
        "hf-hub": lambda: build_for_training(hub_model),
        "local-dir": lambda: build_for_training(f"local-dir:{file.parent}"),
        "pretrained": lambda: build_for_training("tiny", "--model.pretrained", str(file)),
    }[way]()
    assert built.has_trained_weights
    assert 1 / built.towers.logit_scale.item() == pytest.approx(0.02)
    assert built.towers.logit_bias.item() == -6.5


def test_random_weights_start_with_the_temperature_of_the_settings():
    built = build_for_training("tiny", "--temperature.initial", "0.05")
    assert not built.has_trained_weights and 1 / built.towers.logit_scale.item() == pytest.approx(0.05)


def test_a_hub_model_without_weights_is_no_model(hub_model, tmp_path):
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    with pytest.raises(RunFailed, match="no weights"):
        build_model(hub_model)


def test_trying_a_model_once_draws_no_random_number_and_changes_no_statistics():
    built = build_model("tiny")
    model, state = built.towers.model, torch.random.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    encode_once(model, built.tokenize)
    assert model.training and torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
