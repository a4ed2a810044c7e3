"""The two towers of a CLIP model, as training, evaluation and search use them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuclip.models.parts import TowerParts, image_parts, text_parts
from neuclip.models.transforms import normalize_batch

Tokenize = Callable[[list[str]], Tensor]
CHUNK = 32  # rows per call of a locked trunk; in smaller chunks rounding also depends on the number of threads
LENGTH_STEP = 8  # a locked trunk rounds the length of a text up to a multiple, so that many texts have the same length


class Towers(nn.Module):
    """Image and text encoder in one: `image, text, scale = towers(images, tokens)` gives unit rows (b, d) and 1/tau.

    Images are bytes from the transforms of `BuiltModel`, or floats that are already normalized.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, *, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()):
        super().__init__()
        self.model: Any = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)
        self.in_eval: list[nn.Module] = []
        self.locked: dict[str, TowerParts] = {}  # the towers ("image", "text") in which no weight of the trunk trains

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:  # (b, 3, H, W), (b, L) -> (b, d) x 2, ()
        """Image and text features, 1/tau, and the logit bias if the model has one, as open_clip's models return them.
        A locked tower also takes the features (b, width) of its trunk instead of images or tokens."""
        image = self.locked_rows("image", images) if "image" in self.locked else self.encode_image(images)
        text = self.locked_rows("text", texts) if "text" in self.locked else self.encode_text(texts)
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
        # Cut the padding that all texts of the batch share. Only rounding differs, and prompts of ten tokens in a
        # context of 77 are three to eight times faster.
        parts = self.text_parts
        if parts.lengths is None:
            return self.model.encode_text(tokens, normalize=True)
        return F.normalize(parts.head(parts.trunk(tokens[:, : int(parts.lengths(tokens).max())])), dim=-1)

    def text_lengths(self, tokens: Tensor) -> Tensor:  # (b, L) -> (b,)
        """The number of tokens that each text needs. Batches of texts sorted by it have little padding."""
        lengths = self.text_parts.lengths
        return lengths(tokens) if lengths else torch.full((len(tokens),), tokens.shape[1], device=tokens.device)

    @property
    def image_parts(self) -> TowerParts:
        return image_parts(self.model)

    @property
    def text_parts(self) -> TowerParts:
        return text_parts(self.model)

    def locked_rows(self, side: str, inputs: Tensor) -> Tensor:  # -> unit rows (b, d)
        """The output of a locked tower, from images or tokens, or from the features (b, width) of its trunk."""
        has_features = inputs.ndim == 2 and inputs.is_floating_point()
        features = inputs if has_features else self.trunk_features(side, inputs)
        return F.normalize(self.locked[side].head(features), dim=-1)

    @torch.no_grad()
    def trunk_features(self, side: str, inputs: Tensor) -> Tensor:  # images or tokens -> (b, width)
        """The trunk's features, for a locked tower. On a CPU a row's bits do not depend on the rest of its batch."""
        if side == "image":
            return self._in_chunks(lambda images: self.locked[side].trunk(self._pixels(images)), inputs)
        # The length of a text decides its last bits, too: cut it to a length that does not depend on other texts.
        lengths = (self.text_lengths(inputs) + LENGTH_STEP - 1) // LENGTH_STEP * LENGTH_STEP
        order = lengths.argsort(stable=True)
        different, counts = (x.tolist() for x in lengths.unique(return_counts=True))
        by_length = [
            self._in_chunks(self.locked[side].trunk, inputs[rows, :length])
            for length, rows in zip(different, order.split(counts), strict=True)
        ]
        return torch.cat(by_length)[order.argsort()]

    def _in_chunks(self, trunk: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:  # (b, ...) -> (b, width)
        """Run the trunk in chunks of one size: a row's rounding depends on the size of a batch, not on its content
        (measured)."""
        size = CHUNK if inputs.device.type == "cpu" else len(inputs)
        filling = inputs[-1:].expand(-len(inputs) % size, *inputs.shape[1:])
        return torch.cat([trunk(chunk) for chunk in torch.cat([inputs, filling]).split(size)])[: len(inputs)]

    def trunk_sha256(self, side: str) -> str:
        """A hash of the weights of a locked trunk and of its BatchNorm statistics."""
        parts = self.locked[side]
        buffers = [buffer for module in parts.modules for buffer in module.buffers()]
        return tensors_sha256(("", tensor) for tensor in (*parts.trunk_parameters, *buffers))

    def weights_sha256(self) -> str:
        """A hash of the names, types, shapes and values of all parameters and buffers."""
        return tensors_sha256(sorted(self.model.state_dict().items()))

    def freeze(self) -> None:
        """Lock both towers, heads included: the model is a reference for another one."""
        self.requires_grad_(False)
        self.locked = {"image": self.image_parts, "text": self.text_parts}
        self.keep_in_eval([self.model])

    def keep_in_eval(self, modules: list[nn.Module]) -> None:
        """Make `train()` leave these modules in eval mode from now on."""
        self.in_eval = modules
        self.train(self.training)

    def train(self, mode: bool = True) -> Towers:
        super().train(mode)
        for module in self.in_eval:
            module.eval()
        return self

    @property
    def logit_scale(self) -> Tensor:
        """1/tau. The model's parameter is its logarithm."""
        return self.model.logit_scale.exp()

    @property
    def logit_bias(self) -> Tensor | None:
        """The bias that SigLIP adds to each logit; None in a model without one."""
        return self.model.logit_bias

    @property
    def device(self) -> torch.device:
        return self.model.logit_scale.device

    @property
    def log_scale(self) -> float:
        """ln(1/tau): the exact value of the parameter."""
        return self.model.logit_scale.item()

    @torch.no_grad()
    def clamp_log_scale(self, low: float, high: float) -> None:
        self.model.logit_scale.clamp_(low, high)

    @torch.no_grad()
    def set_temperature(self, tau: float) -> None:
        self.model.logit_scale.fill_(math.log(1 / tau))


def tensors_sha256(named: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
