"""Processes: who am I, and how features of all of them come together with an exact gradient.

With one process every function here is the identity, so nothing above this file asks whether it is distributed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_values(rows: Tensor) -> Tensor:  # (b, ...) -> (B, ...)
    """The rows of every process, in rank order, without gradient."""
    if world_size() == 1:
        return rows.detach()
    rows = rows.detach().contiguous()
    gathered = rows.new_empty((world_size() * len(rows), *rows.shape[1:]))
    dist.all_gather_into_tensor(gathered, rows)
    return gathered


def gather_rows(rows: Tensor) -> Tensor:  # (b, d) -> (B, d)
    """The rows of every process, in rank order, with gradient: what any process's loss says of a row reaches its owner.

    The owner receives the *sum* over processes, so the mean over processes that DDP takes of each process's mean over
    its own anchors is exactly the gradient of the mean over the global batch.
    """
    return rows if world_size() == 1 else _GatherRows.apply(rows)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return gather_values(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        local = len(total) // world_size()
        return total[rank() * local : (rank() + 1) * local]
