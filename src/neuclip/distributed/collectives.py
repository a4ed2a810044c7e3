"""Collectives: gather, reduce, and the rows of a sharded state that belong to this rank.

All communication of the package goes through this file. With one process every function returns its input, so no caller
needs to ask whether training is distributed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")

STEP_TIMEOUT = timedelta(minutes=10)  # how long a rank waits for the others within a step
PATIENCE = timedelta(hours=12)  # the same while one rank works alone: indexes shards, evaluates, writes a checkpoint

_single_process = False
_host_group: dist.ProcessGroup | None = None  # for tensors in host memory, which NCCL cannot send
_patient_group: dist.ProcessGroup | None = None  # the same, with the time limit PATIENCE


def connect(store: dist.Store, rank: int, ranks: int, backend: str) -> None:
    """Join the ranks that meet at `store`. Collective. All groups are opened here and not at first use: if a rank
    stopped before the first use, the others would wait for it without a time limit."""
    global _patient_group
    # NCCL kills the process without a message when its limit is over. gloo has a shorter limit, so it fails first.
    limit = STEP_TIMEOUT if backend == "gloo" else 1.5 * STEP_TIMEOUT
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    _patient_group = dist.new_group(backend="gloo", timeout=PATIENCE)
    any_rank(False)


def disconnect() -> None:
    global _host_group, _patient_group
    _host_group = _patient_group = None
    dist.destroy_process_group()


def _is_distributed() -> bool:
    return not _single_process and dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if _is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if _is_distributed() else 1


def is_main() -> bool:
    """Whether this is the main rank (rank 0), which writes and prints."""
    return rank() == 0


@contextmanager
def single_process() -> Iterator[None]:
    """Inside, this rank acts as if it were the only one. For work that one rank does while the others wait."""
    global _single_process
    before, _single_process = _single_process, True
    try:
        yield
    finally:
        _single_process = before


def gather_values(rows: Tensor) -> Tensor:  # (b, ...) -> (B, ...)
    """The rows of all ranks, in rank order, without gradient. Every rank has the same number of rows."""
    rows = rows.detach()
    if world_size() == 1:
        return rows
    rows = rows.contiguous()
    gathered = rows.new_empty((world_size() * len(rows), *rows.shape[1:]))
    _all_gather(gathered, rows, group=_group_of(rows))
    return gathered


def scatter_sum(rows: Tensor) -> Tensor:  # (B, d) -> (b, d)
    """This rank's rows of the sum over ranks."""
    if world_size() == 1:
        return rows
    local = rows.new_empty((len(rows) // world_size(), *rows.shape[1:]))
    _reduce_scatter(local, rows.contiguous(), group=_group_of(rows))
    return local


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum over ranks, the same on every rank."""
    if world_size() == 1:
        return values.detach()
    total = values.detach().clone()
    dist.all_reduce(total, group=_group_of(total))
    return total


def local_range(size: int) -> range:
    """The rows of a sharded state that this rank keeps. Each rank has a contiguous block; if the rows do not divide
    evenly, the first ranks have one row more.

    >>> local_range(10)
    range(0, 10)
    """
    each, longer = divmod(size, world_size())
    first = rank() * each + min(rank(), longer)
    return range(first, first + each + (rank() < longer))


def gather_shares(local: Tensor, size: int) -> Tensor:  # (local rows, ...) -> (size, ...)
    """The complete state from the blocks of `local_range`, on every rank."""
    if world_size() == 1:
        return local
    each, longer = divmod(size, world_size())
    return _gather_blocks(local, [each + (k < longer) for k in range(world_size())])


def gather_rows(local: Tensor) -> Tensor:  # (local rows, ...) -> (all rows, ...)
    """The rows of all ranks, in rank order, without gradient. Ranks may have different numbers of rows, or none."""
    return _gather_blocks(local.detach(), all_gather_int(len(local)))


def _gather_blocks(local: Tensor, lengths: list[int]) -> Tensor:
    if world_size() == 1:
        return local
    padded = local.new_zeros((max(lengths), *local.shape[1:]))
    padded[: len(local)] = local
    blocks = gather_values(padded).unflatten(0, (world_size(), -1)) if len(padded) else padded[None]
    return torch.cat([block[:length] for block, length in zip(blocks, lengths, strict=False)])


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on any rank. Exchanged on the host, without waiting for a device."""
    if world_size() == 1:
        return flag
    total = torch.tensor(int(flag))
    dist.all_reduce(total, op=dist.ReduceOp.MAX, group=_gloo_group())
    return bool(total)


def all_gather_int(value: int, *, patient: bool = False) -> list[int]:
    """The value of each rank, in rank order. Exchanged on the host, without waiting for a device. `patient`: wait up to
    PATIENCE, because another rank may work alone for hours."""
    if world_size() == 1:
        return [value]
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    group = _patient_group if patient and _patient_group else _gloo_group()
    dist.all_gather(gathered, torch.tensor([value]), group=group)
    return [int(number) for number in gathered]


def all_gather_object(value: T) -> list[T]:
    """The value of each rank, in rank order: small and picklable. Exchanged on the host."""
    if world_size() == 1:
        return [value]
    gathered = [value] * world_size()
    dist.all_gather_object(gathered, value, group=_gloo_group())
    return gathered


def _group_of(values: Tensor) -> dist.ProcessGroup | None:
    return _gloo_group() if values.device.type == "cpu" else None


def _gloo_group() -> dist.ProcessGroup | None:
    """The group for tensors in host memory. None means the default group: every backend but NCCL can send them."""
    global _host_group
    if dist.get_backend() != "nccl":
        return None
    if _host_group is None:
        _host_group = dist.new_group(backend="gloo", timeout=STEP_TIMEOUT)
    return _host_group


# torch 2.13 renamed these functions; older versions have the second name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
