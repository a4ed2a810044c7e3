"""What is written is whole or refused, and gives the library that it is for the same tokens, pixels and features."""

from __future__ import annotations

import json
import os
from io import BytesIO
from itertools import count

import numpy as np
import pytest
import torch
from PIL import Image

from neuclip.errors import RunFailed, UserError
from neuclip.models import open_clip_module
from neuclip.models.build import build_model
from neuclip.models.export import export_model, largest_difference, write_format
from tests.builders.images import photo
from tests.builders.models import build_kind, build_vit

TEXTS = ["a photo of a dog", "Hello, World's 12 dogs!!", "ünïcode café — naïve 日本語 😀", "a red bus " * 20, ""]


def photos(*sizes: tuple[int, int]) -> list[Image.Image]:
    return [Image.open(BytesIO(photo(number, size))) for number, size in enumerate(sizes)]


IMAGES = photos((60, 44), (64, 64), (45, 99))


# The folder of open_clip.


def test_a_folder_whose_export_ended_early_is_refused_also_where_it_held_an_older_model(tmp_path, monkeypatch):
    """Ended at each of its flushes to the disk."""
    built, flush = build_model("tiny"), os.fsync
    for last in count(1):
        export_model(built, tmp_path)
        left = last

        def ending(file: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            flush(file)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", ending)
            try:
                export_model(built, tmp_path)
                break
            except KeyboardInterrupt:
                pass
        with pytest.raises(UserError, match=r"there is no .*open_clip_config\.json"):
            build_model(f"local-dir:{tmp_path}")
    assert last > 3


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
    with pytest.raises(RunFailed, match=r"model.safetensors: could not be written .*; make room and try again"):
        export_model(build_model("tiny"), tmp_path)


def test_open_clip_alone_loads_the_folder_with_its_transform_bias_and_features(tmp_path):
    built = build_model("tiny", initial_bias=-10.0)
    torch.nn.init.constant_(built.towers.logit_bias, -6.5)  # as training would leave it
    export_model(built, tmp_path)
    assert json.loads((tmp_path / "open_clip_config.json").read_text())["model_cfg"]["init_logit_bias"] == -10
    model, _, transform = open_clip_module().create_model_and_transforms(f"local-dir:{tmp_path}")
    assert model.logit_bias.item() == -6.5
    assert all(torch.equal(model.state_dict()[name], x) for name, x in built.towers.model.state_dict().items())
    original = Image.effect_noise((60, 40), 80)
    assert torch.equal(transform(original), built.float_transform(original))
    with torch.no_grad():
        want = built.towers.eval().encode_image(built.transform(original)[None])
        assert torch.allclose(model.eval().encode_image(transform(original)[None], normalize=True), want, atol=1e-6)


@pytest.mark.parametrize("kind", ["open_clip", "timm and transformers"])
def test_the_folder_for_open_clip_is_compared_with_the_model(kind, tmp_path):
    assert write_format("open_clip", build_kind(kind, tmp_path), tmp_path / "out", IMAGES, TEXTS) < 1e-6


def test_a_link_planted_in_the_folder_is_replaced_and_not_followed(tmp_path):
    built, folder = build_kind("timm and transformers", tmp_path), tmp_path / "out"
    export_model(built, folder)
    names = sorted(file.name for file in folder.iterdir())
    (tmp_path / "victim").write_text("mine")
    for name in names:
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "victim")
    export_model(built, folder)
    assert (tmp_path / "victim").read_text() == "mine" and sorted(file.name for file in folder.iterdir()) == names
    assert not any(file.is_symlink() for file in folder.iterdir()) and {"tokenizer.json", "config.json"} <= {*names}


# transformers.


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A ViT as transformers reads it, and the model it was made from."""
    pytest.importorskip("transformers", reason="needs the extra `export`")
    folder = tmp_path_factory.mktemp("vit")
    built = build_vit(folder)
    write_format("transformers", built, folder / "out", IMAGES, TEXTS)
    return built, folder / "out"


@torch.no_grad()
def test_auto_classes_load_it_and_give_the_same_features(exported):
    from transformers import AutoModel, AutoProcessor, CLIPModel

    built, folder = exported
    model, processor = AutoModel.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)
    assert isinstance(model, CLIPModel)
    square = photos((64, 64), (200, 200), (32, 32))
    inputs = processor(text=TEXTS, images=square, return_tensors="pt", padding="max_length", truncation=True)
    found = model(**inputs)
    pixels = torch.stack([built.float_transform(image) for image in square])
    assert (inputs["pixel_values"] - pixels).abs().max() * 0.28 < 1.1 / 255  # theirs: torch, ours: Pillow
    assert largest_difference(built.towers.encode_text(built.tokenize(TEXTS)), found.text_embeds) < 1e-6
    assert largest_difference(built.towers.encode_image(inputs["pixel_values"]), found.image_embeds) < 1e-6
    scale = built.towers.logit_scale.item()
    wanted = scale * built.towers.encode_image(pixels).double() @ found.text_embeds.double().T
    np.testing.assert_allclose(found.logits_per_image.numpy(), wanted.numpy(), atol=0.02 * scale)
    assert len({file.stat().st_mode for file in folder.iterdir() if file.is_file()}) == 1  # as other files can be read


def test_tokens_are_the_same_up_to_the_padding(exported):
    from transformers import AutoTokenizer

    built, folder = exported
    theirs = AutoTokenizer.from_pretrained(folder)(TEXTS, padding="max_length", truncation=True)["input_ids"]
    for row, ours in zip(theirs, built.tokenize(TEXTS).tolist(), strict=True):
        end = ours.index(49407) + 1
        assert row[:end] == ours[:end] and set(row[end:]) <= {49407} and len(row) == 16


NO_PLACE = "CLIPModel cannot represent this model: .*; give --to onnx or --to open_clip"
VITS: dict[str, tuple[dict, str]] = {  # and why it is refused, if it is
    "quick GELU": ({"quick_gelu": True}, ""),
    "other widths": ({"vision": {"mlp_ratio": 2.0}, "text": {"mlp_ratio": 3.0}}, ""),
    "custom text": ({"custom_text": True}, ""),
    "a bias": (
        {"init_logit_bias": -10.0},
        "CLIPModel cannot represent this model: it has the logit bias of SigLIP; give --to",
    ),
    "scaled layers": ({"vision": {"ls_init_value": 0.1}}, NO_PLACE),
    "mean pooling": ({"vision": {"pool_type": "avg"}}, "gives other features than this one"),
    "no causal mask": ({"text": {"no_causal_mask": True}}, "gives other features than this one"),
}


@pytest.mark.parametrize("vit", VITS)
def test_vits_become_clip_models_or_are_refused_if_clip_model_cannot_compute_them(vit, tmp_path):
    pytest.importorskip("transformers", reason="needs the extra `export`")
    changes, refusal = VITS[vit]
    if not refusal:
        assert write_format("transformers", build_vit(tmp_path, **changes), tmp_path / "out", IMAGES, TEXTS) < 1e-6
        return
    with pytest.raises((UserError, RunFailed), match=refusal):
        write_format("transformers", build_vit(tmp_path, **changes), tmp_path / "out", IMAGES, TEXTS)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ResNet", "the image tower is a ResNet; give --to onnx or --to open_clip"),
        ("timm and transformers", "the image tower is timm's test_vit, the text tower is transformers' "),
    ],
)
def test_towers_from_elsewhere_are_named_as_what_clip_model_is_not(kind, message, tmp_path):
    pytest.importorskip("transformers", reason="needs the extra `export`")
    with pytest.raises(UserError, match=message) as refused:
        write_format("transformers", build_kind(kind, tmp_path), tmp_path / "out", IMAGES, TEXTS)
    assert "hf_" not in str(refused.value) and "timm_" not in str(refused.value)


# ONNX.


@pytest.mark.slow
def test_onnxruntime_gives_the_same_features_for_any_batch(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    pytest.importorskip("onnxscript", reason="needs the extra `export`")
    from tokenizers import Tokenizer

    built, folder = build_model("tiny"), tmp_path / "out"
    folder.mkdir()
    assert write_format("onnx", built, folder, IMAGES, TEXTS) < 1e-6
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = np.array([one.ids for one in tokenizer.encode_batch(TEXTS)])
    assert tokens.tolist() == built.tokenize(TEXTS).tolist()
    session = onnxruntime.InferenceSession(str(folder / "text.onnx"))
    for size in (1, 5):
        features = torch.from_numpy(session.run(None, {"tokens": tokens[:size]})[0])
        assert largest_difference(built.towers.encode_text(torch.from_numpy(tokens[:size])).detach(), features) < 1e-6
    about = json.loads((folder / "preprocessing.json").read_text())
    assert about["images"]["size"] == [built.image_size] * 2
    assert about["images"]["mean"] == pytest.approx(built.towers.mean.tolist())
    assert about["logit_scale"] == pytest.approx(built.towers.logit_scale.item())
    files = {"image.onnx", "text.onnx", "preprocessing.json", "tokenizer.json"}
    assert {file.name for file in folder.iterdir()} == files


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("neuclip.errors.find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(UserError, match=r"--to onnx needs onnxscript; install with: pip install .*\[export\]"):
        write_format("onnx", build_vit(tmp_path), tmp_path / "out", IMAGES, TEXTS)
