"""The two towers of a CLIP model, with their transforms and tokenizer: any model that open_clip can build."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor, nn

from neuclip.errors import UserError
from neuclip.models import open_clip_module
from neuclip.models.config import HUB, LOCAL, find_config, same_architecture, text_tower_of_folder
from neuclip.models.failures import explain_failures
from neuclip.models.hub import offline_hub
from neuclip.models.parts import TowerParts, image_parts, text_parts
from neuclip.models.pixels import normalize_batch, split_transform
from neuclip.models.short_context import ShortContext
from neuclip.models.tokenizer import load_tokenizer
from neuclip.models.tower_weights import image_weights_file, load_image_weights, timm_normalization

Transform = Callable[[Image], Tensor]
Tokenize = Callable[[list[str]], Tensor]
CHUNK = 32  # rows that go through a locked trunk together; smaller ones round by the number of threads, too
LENGTH_STEP = 8  # tokens to which the length of a text is rounded up in a locked trunk, so that many have the same


class Towers(nn.Module):
    """Image and text encoder together: `image, text, scale = towers(images, tokens)` gives unit rows (b, d) and 1/tau.

    Images are bytes from the transforms of `BuiltModel`, or floats that are already normalized.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, *, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()):
        super().__init__()
        self.model: Any = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.short_context = ShortContext(model)
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)
        self.in_eval: list[nn.Module] = []
        self.locked: dict[str, TowerParts] = {}  # "image" or "text", where no weight of the trunk trains

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:  # (b, 3, H, W), (b, L) -> (b, d) x 2, ()
        """Image and text features, 1/tau, and the bias of a model that has one, as open_clip's models answer. A locked
        tower also takes the features (b, width) of its trunk instead of images or tokens."""
        image = self._locked_rows("image", images) if "image" in self.locked else self.encode_image(images)
        text = self._locked_rows("text", texts) if "text" in self.locked else self.encode_text(texts)
        bias = self.logit_bias
        return (image, text, self.logit_scale) if bias is None else (image, text, self.logit_scale, bias)

    def encode_image(self, images: Tensor) -> Tensor:
        return self.model.encode_image(self._pixels(images), normalize=True)

    def _pixels(self, images: Tensor) -> Tensor:
        if images.dtype == torch.uint8:
            images = normalize_batch(images, self.mean, self.std)
        # Convolutions are faster in this layout: RN50-like towers by a quarter, on a CPU (benchmarked; same values).
        return images.contiguous(memory_format=torch.channels_last)

    def encode_text(self, tokens: Tensor) -> Tensor:
        if self.training or torch.is_grad_enabled():
            return self.model.encode_text(tokens, normalize=True)
        return self.short_context.encode(tokens)  # the same but for rounding

    def text_lengths(self, tokens: Tensor) -> Tensor:  # (b, L) -> (b,)
        """How many of its tokens each text needs: who sorts by it has little padding in a batch."""
        return self.short_context.lengths(tokens)

    # What can be computed once where a tower is locked, and what trains on it then:
    # image_head(encode_image_trunk(images)) gives the rows of encode_image(images).

    @property
    def image_parts(self) -> TowerParts:
        return image_parts(self.model)

    @property
    def text_parts(self) -> TowerParts:
        return text_parts(self.model)

    def encode_image_trunk(self, images: Tensor) -> Tensor:  # (b, 3, H, W) -> (b, width)
        return self.image_parts.trunk(self._pixels(images))

    def image_head(self, features: Tensor) -> Tensor:  # (b, width) -> unit rows (b, d)
        return F.normalize(self.image_parts.head(features), dim=-1)

    def encode_text_trunk(self, tokens: Tensor) -> Tensor:  # (b, L) -> (b, width)
        return self.text_parts.trunk(tokens)

    def text_head(self, features: Tensor) -> Tensor:  # (b, width) -> unit rows (b, d)
        return F.normalize(self.text_parts.head(features), dim=-1)

    def _locked_rows(self, side: str, inputs: Tensor) -> Tensor:  # -> unit rows (b, d)
        has_features = inputs.ndim == 2 and inputs.is_floating_point()
        features = inputs if has_features else self.trunk_features(side, inputs)
        return F.normalize(self.locked[side].head(features), dim=-1)

    @torch.no_grad()
    def trunk_features(self, side: str, inputs: Tensor) -> Tensor:  # images or tokens -> (b, width)
        """Of a locked tower. On a CPU a row has the same bits in whatever batch it comes."""
        if side == "image":
            return self._in_chunks(lambda images: self.locked[side].trunk(self._pixels(images)), inputs)
        # A text is cut to a length that depends on nothing else in the batch: the length, too, decides the last bits.
        lengths = (self.text_lengths(inputs) + LENGTH_STEP - 1) // LENGTH_STEP * LENGTH_STEP
        order = lengths.argsort(stable=True)
        different, counts = (x.tolist() for x in lengths.unique(return_counts=True))
        by_length = [
            self._in_chunks(self.locked[side].trunk, inputs[rows, :length])
            for length, rows in zip(different, order.split(counts), strict=True)
        ]
        return torch.cat(by_length)[order.argsort()]

    def _in_chunks(self, trunk: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:  # (b, ...) -> (b, width)
        """Matrix products round by the size of a batch, not by what is in it (measured): all have one size."""
        size = CHUNK if inputs.device.type == "cpu" else len(inputs)
        filling = inputs[-1:].expand(-len(inputs) % size, *inputs.shape[1:])
        return torch.cat([trunk(chunk) for chunk in torch.cat([inputs, filling]).split(size)])[: len(inputs)]

    def trunk_sha256(self, side: str) -> str:
        """Of the weights of a locked trunk, and of the statistics of its BatchNorm."""
        parts, digest = self.locked[side], hashlib.sha256()
        buffers = [buffer for module in parts.modules for buffer in module.buffers()]
        for tensor in (*parts.trunk_parameters, *buffers):
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def keep_in_eval(self, modules: list[nn.Module]) -> None:
        """From now on `train()` leaves these in eval mode."""
        self.in_eval = modules
        self.train(self.training)

    def train(self, mode: bool = True) -> Towers:
        super().train(mode)
        for module in self.in_eval:
            module.eval()
        return self

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

    @property
    def log_scale(self) -> float:
        """ln(1/tau), which is the parameter, exactly."""
        return self.model.logit_scale.item()

    @torch.no_grad()
    def clamp_log_scale(self, low: float, high: float) -> None:
        self.model.logit_scale.clamp_(low, high)

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
    has_trained_weights: bool = False  # with a temperature, and perhaps a bias, that belong to them


def build_model(
    name: str,
    *,
    pretrained: str = "",
    image_size: int = 0,
    crop_scale: tuple[float, float] = (0.9, 1.0),
    initial_bias: float | None = None,
) -> BuiltModel:
    """Build `tiny`, `small`, `lite0-minilm`, any open_clip name, `local-dir:FOLDER`, `hf-hub:NAME`, or the path of a
    model config.

    Randomly initialised unless `pretrained` names weights or the name is that of a folder or of the hub. `pretrained`
    is a tag, a file, the folder of a saved model, or image=FILE with the weights of a timm image tower. With
    `initial_bias` the model has the logit bias of SigLIP, which starts there unless the weights bring one.

    >>> built = build_model("tiny")
    >>> built.embed_dim
    128
    """
    name, pretrained = folder_as_name(name, pretrained)
    known_name, config = find_config(name)
    image_weights = image_weights_file(name, pretrained)
    pretrained = "" if image_weights else pretrained
    brings_weights = name.startswith((LOCAL, HUB))
    if brings_weights and pretrained:
        raise UserError(f"model.pretrained {pretrained}: {name} has its own weights; remove --model.pretrained")
    if image_size:
        config["vision_cfg"]["image_size"] = image_size
    if initial_bias is not None:
        config["init_logit_bias"] = initial_bias  # the exported config needs it too, or its weights would not load
    # A user who names weights by a tag, or the hub, wants them downloaded, with all that belongs to them.
    download = name.startswith(HUB) or bool(pretrained and not Path(pretrained).exists())
    with (
        silence_open_clip(),
        explain_failures(name, pretrained=pretrained, image_size=image_size),
        offline_hub(name, config, download=download),
    ):
        tokenize = load_tokenizer(known_name)  # first: it may be missing, and large towers take long
        model, train_transform, transform = open_clip_module().create_model_and_transforms(
            known_name,
            pretrained=pretrained or None,
            require_pretrained=bool(pretrained) or brings_weights,
            force_image_size=image_size or None,
            aug_cfg={"scale": crop_scale},
            output_dict=False,
            init_logit_bias=config.get("init_logit_bias"),
            **text_tower_of_folder(name, config),
            **(timm_normalization(config) if image_weights else {}),
        )
        if image_weights:
            load_image_weights(model, image_weights)
        encode_once(model, tokenize)
    if initial_bias is not None and not model.logit_bias.any():
        # open_clip sets the bias to 0 where the weights have none, and SigLIP would call half of all pairs true.
        nn.init.constant_(model.logit_bias, initial_bias)
    return BuiltModel(
        **_with_pixels_apart(model, train_transform, transform),
        float_transform=transform,
        tokenize=tokenize,
        embed_dim=config["embed_dim"],
        image_size=max(image_shape(model)),
        config=config,
        has_trained_weights=bool(pretrained) or brings_weights,
    )


def _with_pixels_apart(model: nn.Module, train_transform: Transform, transform: Transform) -> dict[str, Any]:
    """Towers that normalize bytes, and transforms to bytes; where a transform is of another kind, all of it stays."""
    split, train_split = split_transform(transform), split_transform(train_transform)
    if not (split and train_split):
        return {"towers": Towers(model), "train_transform": train_transform, "transform": transform}
    towers = Towers(model, mean=split.mean, std=split.std)
    return {"towers": towers, "train_transform": train_split.pixels, "transform": split.pixels}


def folder_as_name(name: str, pretrained: str) -> tuple[str, str]:
    """Weights in the folder of a saved model, as the name of that model."""
    folder = Path(pretrained.removeprefix(LOCAL))
    if not pretrained or not (folder / "open_clip_config.json").is_file():
        return name, pretrained
    saved = f"{LOCAL}{folder}"
    if name and name != saved:
        require_same_architecture(name, find_config(saved)[1], pretrained)
    return saved, ""


def require_same_architecture(name: str, config: dict[str, Any], pretrained: str) -> None:
    if not same_architecture(find_config(name)[1], config):
        raise UserError(
            f"model.pretrained {pretrained} has weights of another architecture than model.name {name}; give "
            "--model.name= (empty) to train the model that it holds, or other weights"
        )


def image_shape(model: Any) -> tuple[int, int]:
    """Height and width of a model's images."""
    size = model.visual.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


@torch.no_grad()
def encode_once(model: Any, tokenize: Tokenize) -> None:
    """One image and one text, so that an image size or a vocabulary that does not fit is found now, not in training.
    In eval mode it changes no statistics and draws no random number."""
    model.eval()
    image = model.encode_image(torch.zeros(1, 3, *image_shape(model)))
    text = model.encode_text(tokenize(["a"]))
    model.train()
    if image.shape != text.shape:
        raise ValueError(f"images have {image.shape[-1]} features and texts {text.shape[-1]}")


@contextlib.contextmanager
def silence_open_clip() -> Iterator[None]:
    """open_clip warns that a model which was to be initialized randomly is random; its errors it logs and raises."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(previous)
