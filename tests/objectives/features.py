"""Features for the tests of objectives, and how close two results have to be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CORNERS = ("random", "identical", "one-hot", "opposite")


def unit(*shape: int, seed: int) -> Tensor:
    """Random unit rows in float64."""
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item()))


def corner(kind: str, size: int) -> tuple[Tensor, Tensor]:  # -> (size, 8), (size, 8)
    """Image and text features in float32, as different as unit rows can be; `size` is at most 8."""
    hot = torch.eye(8)[:size]
    return {
        "random": (unit(size, 8, seed=0).float(), unit(size, 8, seed=1).float()),
        "identical": (hot[:1].expand(size, 8), hot[:1].expand(size, 8)),
        "one-hot": (hot, hot),
        "opposite": (hot, -hot),
        "far apart": (unit(size, 8, seed=0).float(), -unit(size, 8, seed=0).float()),
    }[kind]
