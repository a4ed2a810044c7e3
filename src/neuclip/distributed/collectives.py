"""Processes: who am I, what do the others have, and which part of a state is mine.

Every exchange of the package goes through this file: it is the one place where bytes are counted, and with one process
every function is the identity, so nothing above it asks whether it is distributed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

# Others wait at a barrier while the main process evaluates or writes; that may take long and is no fault.
PATIENCE = timedelta(hours=4)

_alone = False
_meters: list[Traffic] = []
_host_group: dist.ProcessGroup | None = None


class Traffic:
    """Bytes that this process sent, counted as ring collectives send them."""

    def __init__(self) -> None:
        self.bytes = 0


def join_ranks(device: torch.device) -> None:
    """Under torchrun: meet the other processes, by NCCL where the device is a GPU and by gloo elsewhere."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)


def leave_ranks() -> None:
    global _host_group
    _host_group = None
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _together() -> bool:
    return not _alone and dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if _together() else 0


def world_size() -> int:
    return dist.get_world_size() if _together() else 1


def is_main() -> bool:
    """The process that writes and prints."""
    return rank() == 0


@contextmanager
def single_process() -> Iterator[None]:
    """Inside, this process is the only one: what one process does while the others wait at a barrier."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """What this process sends inside.

    >>> with counted_traffic() as traffic:
    ...     loss = objective(image, text, logit_scale)        # doctest: +SKIP
    >>> traffic.bytes                                         # doctest: +SKIP
    """
    meter = Traffic()
    _meters.append(meter)
    try:
        yield meter
    finally:
        _meters.remove(meter)


def _count(sent: float) -> None:
    for meter in _meters:
        meter.bytes += round(sent)


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def gather_values(rows: Tensor) -> Tensor:  # (b, ...) -> (B, ...)
    """The rows of every process, in rank order, without gradient."""
    rows = rows.detach()
    if world_size() == 1:
        return rows
    rows = rows.contiguous()
    gathered = rows.new_empty((world_size() * len(rows), *rows.shape[1:]))
    _all_gather(gathered, rows, group=_group_of(rows))
    _count((world_size() - 1) * rows.nbytes)
    return gathered


def scatter_sum(rows: Tensor) -> Tensor:  # (B, d) -> (b, d)
    """Of the sum over processes, the rows of this one."""
    if world_size() == 1:
        return rows
    mine = rows.new_empty((len(rows) // world_size(), *rows.shape[1:]))
    _reduce_scatter(mine, rows.contiguous(), group=_group_of(rows))
    _count((world_size() - 1) * mine.nbytes)
    return mine


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum over processes, everywhere the same."""
    if world_size() == 1:
        return values.detach()
    total = values.detach().clone()
    dist.all_reduce(total, group=_group_of(total))
    _count(2 * (world_size() - 1) / world_size() * total.nbytes)
    return total


def local_range(size: int) -> range:
    """The rows of a sharded state that this process keeps: contiguous blocks, the first ones longer by one.

    >>> local_range(10)
    range(0, 10)
    """
    each, longer = divmod(size, world_size())
    first = rank() * each + min(rank(), longer)
    return range(first, first + each + (rank() < longer))


def gather_shares(mine: Tensor, size: int) -> Tensor:  # (my rows, ...) -> (size, ...)
    """The blocks of `local_range` put together again, on every process."""
    if world_size() == 1:
        return mine
    each, longer = divmod(size, world_size())
    padded = mine.new_zeros((each + (longer > 0), *mine.shape[1:]))
    padded[: len(mine)] = mine
    blocks = gather_values(padded).unflatten(0, (world_size(), -1)) if len(padded) else padded[None]
    return torch.cat([block[: each + (k < longer)] for k, block in enumerate(blocks)])


def any_rank(flag: bool) -> bool:
    """Whether it is true anywhere; asked on the host, without waiting for a device."""
    if world_size() == 1:
        return flag
    total = torch.tensor(int(flag))
    dist.all_reduce(total, op=dist.ReduceOp.MAX, group=_on_host())
    return bool(total)


def all_gather_int(value: int) -> list[int]:
    """A small number of each process, in rank order; asked on the host, without waiting for a device."""
    if world_size() == 1:
        return [value]
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(gathered, torch.tensor([value]), group=_on_host())
    return [int(one) for one in gathered]


def _group_of(values: Tensor) -> dist.ProcessGroup | None:
    return _on_host() if values.device.type == "cpu" else None


def _on_host() -> dist.ProcessGroup | None:
    """The group for what lies in host memory: NCCL moves device memory only, and asking it would stall the device."""
    global _host_group
    if dist.get_backend() == "gloo":
        return None
    if _host_group is None:
        _host_group = dist.new_group(backend="gloo", timeout=PATIENCE)
    return _host_group


# Renamed in torch 2.13; the former names stay for older versions.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
