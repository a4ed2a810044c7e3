"""Two small towers in plain PyTorch. Any model that returns unit rows can replace them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tiny_data import CONTEXT_LENGTH, VOCABULARY
from torch import Tensor, nn

EMBED_DIM = 64


class TinyTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 32, kernel_size=4, stride=4),
            nn.GELU(),
            nn.Conv2d(32, 64, kernel_size=2, stride=2),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(64 * 16, EMBED_DIM),
        )
        self.text = nn.Sequential(
            nn.Embedding(len(VOCABULARY), 16), nn.Flatten(), nn.Linear(16 * CONTEXT_LENGTH, EMBED_DIM)
        )
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unit rows (b, 64) of both sides, and 1 / temperature."""
        image, text = self.image(pixel_values), self.text(input_ids)
        return F.normalize(image, dim=1), F.normalize(text, dim=1), self.logit_scale.exp()
