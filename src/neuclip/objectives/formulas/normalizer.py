"""Normalizers, always as logarithms: at tau = 0.01 one can reach exp(200), where float32 ends at exp(88)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_normalizer(
    similarity: Tensor, positive: Tensor, *, tau: Tensor, eps: float, excluded: Tensor
) -> Tensor:  # (b, B), (b,), (b, B) -> (b,)
    """Eq. 9: log(eps + g), where g is the mean of exp((s_ij - s_ii) / tau) over the candidates not `excluded`.

    Row i's own pair must be among the excluded; a row with nothing left has g = 0. tau is a scalar, or (b,).

    >>> s = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    >>> log_normalizer(s, s.diagonal(), tau=torch.tensor(0.1), eps=0.0, excluded=torch.eye(2, dtype=torch.bool))
    tensor([-8., -6.])
    """
    excess = ((similarity - positive[:, None]) / (tau[:, None] if tau.ndim else tau)).masked_fill(excluded, -math.inf)
    count = (~excluded).sum(dim=1)
    return add_eps(_log_sum_exp(excess) - count.clamp(min=1).to(excess.dtype).log(), eps)


def add_eps(log_mean: Tensor, eps: float) -> Tensor:
    """log(eps + exp(log_mean)); eps sits inside the logarithm and is the floor of every log-normalizer."""
    return log_mean if eps == 0 else torch.logaddexp(log_mean, log_mean.new_tensor(math.log(eps)))


def _log_sum_exp(rows: Tensor) -> Tensor:
    # torch.logsumexp of a row that is all -inf is -inf with a NaN gradient; an empty row must have gradient 0.
    empty = torch.isneginf(rows).all(dim=1)
    total = torch.logsumexp(rows.masked_fill(empty[:, None], 0.0), dim=1)
    return total.masked_fill(empty, -math.inf)
