"""Towers small enough to write down: an image is its mean colour, a text the colours it names."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from neuclip.evaluation.embedding import Embedder
from neuclip.models.build import BuiltModel

COLOURS = {"red": (1.0, 0.0, 0.0), "green": (0.0, 1.0, 0.0), "blue": (0.0, 0.0, 1.0)}


class ColourTowers(nn.Module):
    """encode_image: (b, 3, H, W) -> mean colour; encode_text: (b, 3) colour counts; both through one linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3, bias=False)
        self.locked = nn.Dropout(0.5)
        nn.init.eye_(self.map.weight)
        self.modes: list[bool] = []
        self.encoded_images = self.encoded_texts = 0

    @property
    def device(self) -> torch.device:
        return self.map.weight.device

    def encode_image(self, images: Tensor) -> Tensor:
        self.modes.append(self.training)
        self.encoded_images += len(images)
        return F.normalize(self.map(self.locked(images.mean(dim=(2, 3)))), dim=1)

    def text_lengths(self, tokens: Tensor) -> Tensor:
        return tokens.argmax(dim=1)

    def encode_text(self, tokens: Tensor) -> Tensor:
        self.encoded_texts += len(tokens)
        return F.normalize(self.map(tokens), dim=1)


def to_tensor(image: Image.Image) -> Tensor:  # -> (3, 8, 8)
    return torch.from_numpy(np.array(image.convert("RGB").resize((8, 8)))).permute(2, 0, 1) / 255


def count_colours(texts: list[str]) -> Tensor:  # -> (b, 3)
    named = [[text.split().count(colour) for colour in COLOURS] for text in texts]
    return torch.tensor(named, dtype=torch.float32) + 0.01


def colour_embedder(towers: ColourTowers | None = None, **options) -> Embedder:
    """With batches of 3 and no workers, unless told otherwise."""
    built = BuiltModel(towers or ColourTowers(), to_tensor, to_tensor, to_tensor, count_colours, 3, 8, {})
    return Embedder(built, **{"batch_size": 3, "workers": 0, **options})
