"""A model's name and its config: each mistake is one line that names the file or field and says what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from neuclip.errors import UserError
from neuclip.models import open_clip_module
from neuclip.models.build import build_model
from neuclip.models.config import SHIPPED, different_fields, find_model
from neuclip.models.export import export_model

TINY = json.loads((SHIPPED / "tiny.json").read_text())


def tiny_with(**sections: dict[str, Any]) -> dict[str, Any]:
    return TINY | {key: TINY[key] | value for key, value in sections.items()}


def write(file: Path, content: Any) -> str:
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def check_line(message: str, part: str = "") -> None:
    """One line: what, and after a semicolon what to do."""
    assert part in message and "\n" not in message and "; " in message and len(message) < 600, message


CONFIGS: dict[str, tuple[Any, str]] = {
    "not JSON": ("{,}", "mine.json: is damaged, or not what it should be (JSONDecodeError"),
    "not text": ("\x00", "mine.json: is damaged, or not what it should be (JSONDecodeError"),
    "nested too deep": ("[" * 100_000, "mine.json: is damaged, or not what it should be (RecursionError"),
    "a list": ("[]", "mine.json holds no JSON object"),
    "no text tower": ({"embed_dim": 8, "vision_cfg": {}}, "mine.json has no text_cfg"),
    "a config of a folder": ({"model_cfg": TINY}, "local-dir:"),
    "a section of another kind": (TINY | {"vision_cfg": 3}, "vision_cfg is 3"),
    "a width in words": (TINY | {"embed_dim": "wide"}, "embed_dim is 'wide'"),
    "an unknown field": (tiny_with(text_cfg={"contxt_length": 8}), "text_cfg.contxt_length"),
    "heads that do not divide": (tiny_with(text_cfg={"heads": 7}), "correct"),
    "a field of another kind": (tiny_with(text_cfg={"width": "wide"}), "mine.json"),
    "no width": (TINY | {"embed_dim": 0}, "mine.json"),
    "a vocabulary too small for the tokenizer": (tiny_with(text_cfg={"vocab_size": 100}), "mine.json"),
    "an unknown pooling": (tiny_with(text_cfg={"pool_type": "nothing"}), "mine.json"),
    "an unknown image tower": (tiny_with(vision_cfg={"timm_model_name": "resnet51"}), "resnet51"),
    "an unknown cleaning": (tiny_with(text_cfg={"tokenizer_kwargs": {"clean": "soap"}}), "mine.json"),
    "an image size of zero": (tiny_with(vision_cfg={"image_size": 0}), "mine.json"),
    "a decoder without its own text tower": (TINY | {"multimodal_cfg": {"width": 8}}, "mine.json"),
    # What open_clip would hand on to torch, timm or transformers, where it may mean "run this code".
    "a tokenizer's argument": (tiny_with(text_cfg={"tokenizer_kwargs": {"trust_remote_code": False}}), "trust_remote"),
    "a tokenizer's file": (tiny_with(text_cfg={"tokenizer_kwargs": {"tokenizer_file": "x"}}), "tokenizer_file"),
    "pairs as arguments": (tiny_with(text_cfg={"tokenizer_kwargs": [["trust_remote_code", True]]}), "tokenizer_kwargs"),
    "a norm's argument": (tiny_with(text_cfg={"norm_kwargs": {"device": "cuda"}}), "text_cfg.norm_kwargs.device "),
    "a field of transformers": (tiny_with(text_cfg={"hf_model_config": {"auto_map": {}}}), "text_cfg.hf_model_config "),
    "an object for a number": (tiny_with(text_cfg={"heads": {"auto_map": 4}}), "text_cfg.heads "),
    "an image tower of the hub": (tiny_with(vision_cfg={"timm_model_name": "hf-hub:a/b"}), "timm_model_name"),
    "an image tower of a folder": (tiny_with(vision_cfg={"timm_model_name": "local-dir:/tmp"}), "timm_model_name"),
    "an image tower of a path": (tiny_with(vision_cfg={"timm_model_name": "/tmp/x"}), "timm_model_name"),
    "an argument of open_clip": (TINY | {"pretrained_image_path": "x"}, "pretrained_image_path "),
    "another argument of open_clip": (TINY | {"cast_dtype": "x"}, "cast_dtype "),
}


@pytest.mark.parametrize("mistake", CONFIGS)
def test_a_mistake_in_a_config_is_one_line(mistake, tmp_path):
    content, message = CONFIGS[mistake]
    with pytest.raises(UserError) as caught:
        build_model(write(tmp_path / "mine.json", content))
    check_line(str(caught.value), message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ViT-B32", "ViT-B-32"),
        ("nowhere.json", "no such file"),
        ("local-dir:nowhere", "open_clip_config.json"),
        ("local-dir:", "give the folder"),
        ("qqqqqqqq", "list_models"),
    ],
)
def test_an_unknown_model_names_what_was_probably_meant(name, message):
    with pytest.raises(UserError) as caught:
        build_model(name)
    check_line(str(caught.value), message)


def test_what_was_probably_meant_is_said_once_also_after_that_model_was_built():
    build_model("tiny")
    with pytest.raises(UserError, match=r"did you mean tiny\?|did you mean tiny or (?!tiny)"):
        build_model("tinny")


FOLDERS: dict[str, tuple[Any, str]] = {
    "no JSON": ("no", "open_clip_config.json: is damaged"),
    "no section": (TINY, "has no model_cfg"),
    "a field that is none": ({"model_cfg": TINY | {"x": 1}}, "open_clip_config.json: x is not a field"),
    "no preparation": ({"model_cfg": TINY, "preprocess_cfg": 3}, "open_clip_config.json: preprocess_cfg is 3"),
    "a mean in words": ({"model_cfg": TINY, "preprocess_cfg": {"mean": "grey"}}, "open_clip_config.json"),
    "two numbers": ({"model_cfg": TINY, "preprocess_cfg": {"std": [0.5, 0.5]}}, "preprocess_cfg.std is [0.5, 0.5]"),
    "an interpolation": ({"model_cfg": TINY, "preprocess_cfg": {"interpolation": 3}}, "open_clip_config.json"),
    "a width": ({"model_cfg": tiny_with(text_cfg={"width": "wide"})}, "open_clip_config.json"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    export_model(build_model("tiny"), folder)
    return folder


@pytest.mark.parametrize("damage", FOLDERS)
def test_a_damaged_config_of_a_folder_is_one_line_that_names_the_file(damage, saved, tmp_path):
    content, message = FOLDERS[damage]
    (tmp_path / "open_clip_model.safetensors").symlink_to(saved / "open_clip_model.safetensors")
    write(tmp_path / "open_clip_config.json", content)
    with pytest.raises(UserError) as caught:
        build_model(f"local-dir:{tmp_path}")
    check_line(str(caught.value), message)


def test_a_folder_needs_its_prefix_and_its_weights(saved, tmp_path):
    with pytest.raises(UserError, match=r"give --model.name local-dir:"):
        build_model(str(saved))
    (tmp_path / "open_clip_config.json").write_bytes((saved / "open_clip_config.json").read_bytes())
    with pytest.raises(UserError, match=f"{tmp_path} has no weights"):
        build_model(f"local-dir:{tmp_path}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
@pytest.mark.parametrize("file", ["open_clip_config.json", "open_clip_model.safetensors"])
def test_files_that_may_not_be_read(file, tmp_path):
    export_model(build_model("tiny"), tmp_path)
    (tmp_path / file).chmod(0)
    with pytest.raises(UserError) as caught:
        build_model(f"local-dir:{tmp_path}")
    check_line(str(caught.value))


def test_every_config_of_open_clip_itself_passes_the_check(tmp_path):
    """As the file of somebody else, which it is after an export."""
    for name in open_clip_module().list_models():
        config = open_clip_module().get_model_config(name)
        assert find_model(write(tmp_path / "mine.json", config)).config == config


def test_two_architectures_differ_in_what_decides_their_weights_and_features():
    sized = tiny_with(vision_cfg={"image_size": 99}, text_cfg={"context_length": 99}) | {"init_logit_bias": -10}
    assert different_fields(TINY, sized | {"quick_gelu": False}) == []
    other = tiny_with(vision_cfg={"width": 99}, text_cfg={"heads": 1}) | {"quick_gelu": True}
    assert different_fields(TINY, other) == ["quick_gelu", "text_cfg.heads", "vision_cfg.width"]
