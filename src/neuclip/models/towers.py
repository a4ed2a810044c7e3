"""The two towers of a CLIP model, with their transforms and tokenizer: any model that open_clip can build."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from neuclip.errors import UserError
from neuclip.models import open_clip_module
from neuclip.models.hub import offline_hub
from neuclip.models.pixels import normalize_batch, split_transform

SHIPPED = Path(__file__).parent / "configs"

Transform = Callable[[Image], Tensor]
Tokenize = Callable[[list[str]], Tensor]


class Towers(nn.Module):
    """Image and text encoder together: `image, text = towers(images, tokens)` gives unit rows (b, d).

    Images are bytes from the transforms of `BuiltModel`, or floats that are already normalized.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, *, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()):
        super().__init__()
        self.model: Any = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:  # (b, 3, H, W), (b, L) -> (b, d) x 2
        return self.encode_image(images), self.encode_text(tokens)

    def encode_image(self, images: Tensor) -> Tensor:
        if images.dtype == torch.uint8:
            images = normalize_batch(images, self.mean, self.std)
        # Convolutions are faster in this layout: RN50-like towers by a quarter, on a CPU (benchmarked; same values).
        return self.model.encode_image(images.contiguous(memory_format=torch.channels_last), normalize=True)

    def encode_text(self, tokens: Tensor) -> Tensor:
        return self.model.encode_text(tokens, normalize=True)

    @property
    def logit_scale(self) -> Tensor:
        """1/tau; the parameter itself is its logarithm."""
        return self.model.logit_scale.exp()

    @property
    def logit_bias(self) -> Tensor | None:
        """What SigLIP adds to each logit; None in a model without one."""
        return self.model.logit_bias

    @property
    def device(self) -> torch.device:
        return self.model.logit_scale.device

    @torch.no_grad()
    def clamp_temperature(self, minimum: float, maximum: float) -> None:
        self.model.logit_scale.clamp_(math.log(1 / maximum), math.log(1 / minimum))

    @torch.no_grad()
    def set_temperature(self, tau: float) -> None:
        self.model.logit_scale.fill_(math.log(1 / tau))


@dataclass(frozen=True)
class BuiltModel:
    """Towers, their transforms and their tokenizer."""

    towers: Towers
    train_transform: Transform  # to bytes, which the towers normalize
    transform: Transform  # the same for evaluation: deterministic
    float_transform: Transform  # open_clip's own for evaluation, for use with the bare model
    tokenize: Tokenize
    embed_dim: int
    image_size: int
    config: dict[str, Any]  # open_clip's model_cfg, complete


def build_model(
    name: str,
    *,
    pretrained: str = "",
    image_size: int = 0,
    crop_scale: tuple[float, float] = (0.9, 1.0),
    initial_bias: float | None = None,
) -> BuiltModel:
    """Build `tiny`, `small`, any open_clip name, `local-dir:FOLDER`, or the path of a model config.

    Randomly initialised unless `pretrained` names weights or the name is a local-dir. With `initial_bias` the model has
    the logit bias of SigLIP, which starts there unless the weights bring one.

    >>> built = build_model("tiny")
    >>> built.embed_dim
    128
    """
    open_clip = open_clip_module()
    known_name, config = find_config(name)
    if image_size:
        config["vision_cfg"]["image_size"] = image_size
    if initial_bias is not None:
        config["init_logit_bias"] = initial_bias  # the exported config needs it too, or its weights would not load
    # A user who names weights by a tag wants them downloaded, with all that belongs to them.
    download = pretrained and not Path(pretrained).exists()
    with silence_open_clip(), contextlib.nullcontext() if download else offline_hub(name, config):
        tokenize = open_clip.get_tokenizer(known_name)  # first: it may be missing, and large towers take long
        model, train_transform, transform = open_clip.create_model_and_transforms(
            known_name,
            pretrained=pretrained or None,
            force_image_size=image_size or None,
            aug_cfg={"scale": crop_scale},
            output_dict=False,
            init_logit_bias=config.get("init_logit_bias"),
        )
    if initial_bias is not None and not model.logit_bias.any():
        # open_clip sets the bias to 0 where the weights have none, and SigLIP would call half of all pairs true.
        nn.init.constant_(model.logit_bias, initial_bias)
    split, train_split = split_transform(transform), split_transform(train_transform)
    return BuiltModel(
        towers=Towers(model, mean=split.mean, std=split.std) if split and train_split else Towers(model),
        train_transform=train_split.pixels if split and train_split else train_transform,
        transform=split.pixels if split and train_split else transform,
        float_transform=transform,
        tokenize=tokenize,
        embed_dim=config["embed_dim"],
        image_size=config["vision_cfg"]["image_size"],
        config=config,
    )


def find_config(name: str) -> tuple[str, dict[str, Any]]:
    """The name under which open_clip knows the model, and its configuration."""
    open_clip = open_clip_module()
    if name.startswith("local-dir:"):
        file = Path(name.removeprefix("local-dir:")) / "open_clip_config.json"
        if not file.is_file():
            raise UserError(f"model.name {name}: there is no {file}; give the folder of a saved open_clip model")
        return name, _read_config(file)["model_cfg"]
    shipped = SHIPPED / f"{name}.json"
    file = shipped if shipped.is_file() else Path(name)
    if file.suffix == ".json":
        if not file.is_file():
            raise UserError(f"model.name {name}: no such file; give the path of an open_clip model config")
        config = _read_config(file)
        open_clip.add_model_config(file)
        return file.stem, config
    config = open_clip.get_model_config(name)
    if config is None:
        raise UserError(f"model.name {name} is not known; {_nearest_model(name, open_clip.list_models())}")
    return name, config


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not JSON ({error}); give an open_clip model config") from error
    inner = config.get("model_cfg", config)
    missing = [key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in inner]
    if missing:
        raise UserError(f"{file} has no {', '.join(missing)}; give an open_clip model config")
    return config


def _nearest_model(name: str, known: list[str]) -> str:
    choices = sorted(path.stem for path in SHIPPED.glob("*.json")) + list(known)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else "open_clip.list_models() lists them, beside tiny and small"


@contextlib.contextmanager
def silence_open_clip() -> Iterator[None]:
    """open_clip warns that a model which was to be initialized randomly is random."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous)
