"""What is written for another library gives that library the same tokens, pixels and features."""

from __future__ import annotations

import json
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from neuclip.errors import RunFailed, UserError
from neuclip.models import formats
from neuclip.models.export import export_model
from neuclip.models.formats import Format, largest_difference, write_format
from neuclip.models.towers import build_model
from tests.builders.images import photo
from tests.builders.models import build, build_vit, timm_and_bert, write_bert

TEXTS = ["a photo of a dog", "Hello, World's 12 dogs!!", "ünïcode café — naïve 日本語 😀", "a red bus " * 20, ""]


def photos(*sizes: tuple[int, int]) -> list[Image.Image]:
    return [Image.open(BytesIO(photo(number, size))) for number, size in enumerate(sizes)]


IMAGES = photos((60, 44), (64, 64), (45, 99))


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


def test_tokens_are_the_same_up_to_the_padding(exported):
    from transformers import AutoTokenizer

    built, folder = exported
    theirs = AutoTokenizer.from_pretrained(folder)(TEXTS, padding="max_length", truncation=True)["input_ids"]
    for row, ours in zip(theirs, built.tokenize(TEXTS).tolist(), strict=True):
        end = ours.index(49407) + 1
        assert row[:end] == ours[:end] and set(row[end:]) <= {49407} and len(row) == 16


@pytest.mark.parametrize(
    "changes", [{"quick_gelu": True}, {"vision": {"mlp_ratio": 2.0}, "text": {"mlp_ratio": 3.0}}, {"custom_text": True}]
)
def test_other_vits_become_clip_models_too(changes, tmp_path):
    pytest.importorskip("transformers", reason="needs the extra `export`")
    assert write_format("transformers", build_vit(tmp_path, **changes), tmp_path / "out", IMAGES, TEXTS) < 1e-6


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"init_logit_bias": -10.0}, "it has the logit bias of SigLIP"),
        ({"vision": {"pool_type": "avg"}}, "vision_cfg.pool_type is avg"),
        ({"vision": {"ls_init_value": 0.1}}, "vision_cfg.ls_init_value is 0.1"),
        ({"text": {"no_causal_mask": True}}, "text_cfg.no_causal_mask is True"),
    ],
)
def test_what_clip_model_cannot_compute_is_refused_with_the_reason(changes, reason, tmp_path):
    pytest.importorskip("transformers", reason="needs the extra `export`")
    with pytest.raises(UserError, match="is no CLIPModel of transformers") as refused:
        write_format("transformers", build_vit(tmp_path, **changes), tmp_path / "out", IMAGES, TEXTS)
    assert reason in str(refused.value) and not (tmp_path / "out").exists()


def test_a_resnet_is_no_clip_model_of_transformers(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra `export`")
    with pytest.raises(UserError, match="the image tower is a ResNet; give --to onnx or --to open_clip"):
        write_format("transformers", build_model("tiny"), tmp_path, IMAGES, TEXTS)


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
    for count in (1, 5):
        features = torch.from_numpy(session.run(None, {"tokens": tokens[:count]})[0])
        assert largest_difference(built.towers.encode_text(torch.from_numpy(tokens[:count])).detach(), features) < 1e-6
    about = json.loads((folder / "preprocessing.json").read_text())
    assert about["images"]["size"] == [built.image_size] * 2
    assert about["logit_scale"] == pytest.approx(built.towers.logit_scale.item())
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        ["image.onnx", "text.onnx", "preprocessing.json", "tokenizer.json"]
    )


def test_a_format_that_gives_other_features_is_refused(tmp_path, monkeypatch):
    other = build_vit(tmp_path)
    with torch.no_grad():
        other.towers.model.visual.proj += 0.05
    wrong = Format(lambda built, folder: export_model(other, folder), formats.encode_with_open_clip)
    monkeypatch.setitem(formats.FORMATS, "open_clip", wrong)
    with pytest.raises(RunFailed, match="gives other features than this one"):
        write_format("open_clip", build_vit(tmp_path), tmp_path / "out", IMAGES, TEXTS)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(
        formats.FORMATS, "onnx", Format(export_model, formats.encode_with_open_clip, ("no_such_package",))
    )
    with pytest.raises(UserError, match=r"--to onnx needs no_such_package; pip install 'neuclip\[export\]'"):
        write_format("onnx", build_vit(tmp_path), tmp_path / "out", IMAGES, TEXTS)


def test_towers_from_elsewhere_are_named_as_what_clip_model_is_not(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra `export`")
    built = build(tmp_path, timm_and_bert(write_bert(tmp_path / "bert")))
    with pytest.raises(
        UserError, match="the image tower is timm's test_vit, the text tower is transformers' "
    ) as refused:
        write_format("transformers", built, tmp_path / "out", IMAGES, TEXTS)
    assert "hf_" not in str(refused.value) and "timm_" not in str(refused.value)


def test_weights_for_transformers_can_be_read_by_others_as_the_other_files_can(exported):
    _, folder = exported
    assert len({file.stat().st_mode for file in folder.iterdir() if file.is_file()}) == 1
