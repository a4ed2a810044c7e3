"""Double-loop twins of Eq. 9 to 12 and Algorithm 1's inner update through autograd and torch.optim."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_normalizer(s: list[list[float]], i: int, tau: float, eps: float) -> float:
    others = [math.exp((s[i][j] - s[i][i]) / tau) for j in range(len(s)) if j != i]
    return math.log(eps + sum(others) / len(others))


def alpha(anchor: list[float], positive: float, prototypes: list[list[float]], tau: float, eps: float) -> float:
    total = 0.0
    for row in prototypes:
        length = math.sqrt(sum(w * w for w in row))
        cosine = sum(e * w for e, w in zip(anchor, row, strict=True)) / length
        total += math.exp((cosine - positive) / tau)
    return math.log(eps + total / len(prototypes))


def unified_objective(
    image: Tensor, text: Tensor, prototypes_for_image: Tensor, prototypes_for_text: Tensor, tau: Tensor, *,
    rho: float, eps: float, detach_alpha: bool = False
) -> Tensor:  # fmt: skip
    """Eq. 12 in linear space with autograd throughout; overflows where the package must not."""
    s = image @ text.T
    a = s.diagonal()
    size = len(s)
    off_diagonal = 1 - torch.eye(size, dtype=s.dtype)
    total = tau * 2 * (rho - 1)
    for similarity, anchors, rows in ((s, image, prototypes_for_image), (s.T, text, prototypes_for_text)):
        g = (torch.exp((similarity - a[:, None]) / tau) * off_diagonal).sum(1) / (size - 1)
        cosine = anchors @ (rows / rows.norm(dim=1, keepdim=True)).T
        predicted = torch.log(eps + torch.exp((cosine - a[:, None]) / tau).mean(1))
        if detach_alpha:
            predicted = predicted.detach()
        total = total + tau * ((eps + g) * torch.exp(-predicted) + predicted).mean()
    return total


def separate_objective(
    image: Tensor, text: Tensor, prototypes_for_image: Tensor, prototypes_for_text: Tensor, tau: Tensor, *,
    rho: float, eps: float
) -> Tensor:  # fmt: skip
    """Half the mean squared difference of predicted and batch log-normalizers, both sides."""
    s = image @ text.T
    a = s.diagonal()
    off_diagonal = 1 - torch.eye(len(s), dtype=s.dtype)
    total = torch.zeros((), dtype=s.dtype)
    for similarity, anchors, rows in ((s, image, prototypes_for_image), (s.T, text, prototypes_for_text)):
        g = (torch.exp((similarity - a[:, None]) / tau) * off_diagonal).sum(1) / (len(s) - 1)
        cosine = anchors @ (rows / rows.norm(dim=1, keepdim=True)).T
        predicted = torch.log(eps + torch.exp((cosine - a[:, None]) / tau).mean(1))
        total = total + (predicted - torch.log(eps + g)).square().mean() / 2
    return total
