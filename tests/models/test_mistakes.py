"""Mistakes in loading a model: each is one line that names the file or field and says what to do, never a traceback."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from neuclip.errors import RunFailed, UserError
from neuclip.models.config import SHIPPED
from neuclip.models.export import export_model
from neuclip.models.facts import model_facts
from neuclip.models.towers import build_model

TINY = json.loads((SHIPPED / "tiny.json").read_text())


def write(file: Path, content: Any) -> str:
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def tiny_with(**sections: dict[str, Any]) -> dict[str, Any]:
    return {key: value | sections[key] if key in sections else value for key, value in TINY.items()}


CONFIGS: dict[str, tuple[Any, str]] = {
    "not JSON": ("{,}", "mine.json is not JSON"),
    "not text": ("\x00", "mine.json is not JSON"),
    "nested too deep": ("[" * 100_000, "mine.json is not JSON"),
    "a list": ("[]", "mine.json holds no JSON object"),
    "no text tower": ({"embed_dim": 8, "vision_cfg": {}}, "mine.json has no text_cfg"),
    "a config of a folder": ({"model_cfg": TINY}, "local-dir:"),
    "a section of another kind": (TINY | {"vision_cfg": 3}, "vision_cfg is 3"),
    "a width in words": (TINY | {"embed_dim": "wide"}, "embed_dim is 'wide'"),
    "an unknown field": (tiny_with(text_cfg={"contxt_length": 8}), "text_cfg.contxt_length"),
    "heads that do not divide": (tiny_with(text_cfg={"heads": 7}), "mine.json"),
    "a field of another kind": (tiny_with(text_cfg={"width": "wide"}), "mine.json"),
    "no width": (TINY | {"embed_dim": 0}, "mine.json"),
    "a vocabulary too small for the tokenizer": (tiny_with(text_cfg={"vocab_size": 100}), "mine.json"),
    "an unknown pooling": (tiny_with(text_cfg={"pool_type": "nothing"}), "mine.json"),
    "an unknown image tower": (tiny_with(vision_cfg={"timm_model_name": "resnet51"}), "resnet51"),
    "an unknown cleaning": (tiny_with(text_cfg={"tokenizer_kwargs": {"clean": "soap"}}), "mine.json"),
    "an image size of zero": (tiny_with(vision_cfg={"image_size": 0}), "mine.json"),
}


@pytest.mark.parametrize("mistake", CONFIGS)
def test_a_mistake_in_a_config(mistake, tmp_path):
    content, message = CONFIGS[mistake]
    name = write(tmp_path / "mine.json", content)
    with pytest.raises(UserError) as caught:
        build_model(name)
    check_line(str(caught.value), message)


def folder_with(config: Any) -> Callable[[Path], dict[str, Any]]:
    def prepare(folder: Path) -> dict[str, Any]:
        export_model(build_model("tiny"), folder)
        write(folder / "open_clip_config.json", config)
        return {"name": f"local-dir:{folder}"}

    return prepare


def of_another_width(folder: Path) -> dict[str, Any]:
    torch.save(build_model("small").towers.model.state_dict(), folder / "weights.pt")
    return {"name": "tiny", "pretrained": str(folder / "weights.pt")}


def file_with(name: str, content: bytes) -> Callable[[Path], dict[str, Any]]:
    def prepare(folder: Path) -> dict[str, Any]:
        (folder / name).write_bytes(content)
        return {"name": "tiny", "pretrained": str(folder / name)}

    return prepare


def saved(content: Any, name: str = "weights.pt") -> Callable[[Path], dict[str, Any]]:
    def prepare(folder: Path) -> dict[str, Any]:
        torch.save(content, folder / name)
        return {"name": "tiny", "pretrained": str(folder / name)}

    return prepare


def truncated(folder: Path) -> dict[str, Any]:
    export_model(build_model("tiny"), folder)
    with (folder / "open_clip_model.safetensors").open("r+b") as file:
        file.truncate(5000)
    return {"name": f"local-dir:{folder}"}


def other_tensors(folder: Path) -> dict[str, Any]:
    export_model(build_model("tiny"), folder)
    save_file({"adapter": torch.zeros(3)}, folder / "open_clip_model.safetensors")
    return {"name": f"local-dir:{folder}"}


def both(folder: Path) -> dict[str, Any]:
    export_model(build_model("tiny"), folder)
    return {"name": f"local-dir:{folder}", "pretrained": str(folder / "open_clip_model.safetensors")}


WEIGHTS: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "of another architecture": (of_another_width, r"weights.pt.*width changed"),
    "no checkpoint": (file_with("weights.pt", b"these are no weights"), "weights.pt"),
    "an empty file": (file_with("weights.pt", b""), "weights.pt"),
    "an empty safetensors file": (file_with("weights.safetensors", b""), "weights.safetensors"),
    "an array": (file_with("weights.npz", b"PK"), "weights.npz"),
    "pickled objects": (file_with("weights.pt", pickle.dumps(Path("x"))), "weights.pt"),
    "an empty dictionary": (saved({}), "weights.pt"),
    "a list": (saved([1, 2]), "weights.pt"),
    "numbers instead of tensors": (saved({"logit_scale": 1.0}), "weights.pt"),
    "no temperature": (saved({"text_projection": torch.zeros(128, 128)}), "weights.pt"),
    "a truncated safetensors file": (truncated, "local-dir:"),
    "other tensors": (other_tensors, "local-dir:"),
    "a folder's weights and others": (both, "remove --model.pretrained"),
    "a folder": (lambda folder: {"name": "tiny", "pretrained": str(folder)}, "is a folder"),
    "no file": (lambda folder: {"name": "tiny", "pretrained": str(folder / "x.pt")}, "neither a file nor a tag"),
    "weights of another activation": (
        lambda folder: {"name": "ViT-B-32", "pretrained": "openai"},
        "give ViT-B-32-quickgelu as the model",
    ),
    "an unknown tag": (lambda folder: {"name": "ViT-B-32", "pretrained": "opnai"}, "openai"),
    "a folder whose config is no config": (folder_with("no"), "open_clip_config.json is not JSON"),
    "a folder whose config lacks its section": (folder_with(TINY), "has no model_cfg"),
    "a folder whose transform is none": (
        folder_with({"model_cfg": TINY, "preprocess_cfg": {"mean": "grey", "interpolation": 3}}),
        "open_clip_config.json",
    ),
    "a folder without a prefix": (lambda folder: {"name": str(both(folder) and folder)}, "local-dir:"),
    "an empty folder name": (lambda folder: {"name": "local-dir:"}, "give the folder"),
    "images smaller than a patch": (lambda folder: {"name": "ViT-B-32", "image_size": 8}, "image_size than 8"),
    "images that do not fit the grid": (lambda folder: {"name": "tiny", "image_size": 16}, "image_size than 16"),
}


@pytest.mark.parametrize("mistake", WEIGHTS)
def test_a_mistake_in_weights_folders_and_sizes(mistake, tmp_path):
    prepare, message = WEIGHTS[mistake]
    arguments = prepare(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        build_model(arguments.pop("name"), **arguments)
    check_line(str(caught.value))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
@pytest.mark.parametrize("file", ["open_clip_config.json", "open_clip_model.safetensors"])
def test_files_that_may_not_be_read(file, tmp_path):
    export_model(build_model("tiny"), tmp_path)
    (tmp_path / file).chmod(0)
    with pytest.raises(UserError) as caught:
        build_model(f"local-dir:{tmp_path}")
    check_line(str(caught.value))


@pytest.mark.parametrize("mistake", ["heads that do not divide", "an image size of zero", "an unknown image tower"])
def test_doctor_says_it_too(mistake, tmp_path):
    content, message = CONFIGS[mistake]
    with pytest.raises(UserError, match=message) as caught:
        model_facts(write(tmp_path / "mine.json", content))
    check_line(str(caught.value))


def test_a_model_of_the_hub_that_is_not_here(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("hf-hub:nobody/nothing", "hf-hub:"):
        with pytest.raises(RunFailed, match="could not be downloaded") as caught:
            build_model(name)
        check_line(str(caught.value))


def check_line(message: str, part: str = "") -> None:
    """One line: what, and after a semicolon what to do."""
    assert part in message and "\n" not in message and "; " in message and len(message) < 600
