"""State that a method keeps by itself: rows in slots that are spread over ranks, a table by sample id, and the two
optimizers that move what a method learns, which are torch.optim's, elementwise and in place."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adagrad import adagrad

from neuclip.distributed.collectives import gather_shares, local_range, sum_over_ranks

ADAGRAD_EPS, ADAM_EPS, ADAM_BETAS = 1e-10, 1e-8, (0.9, 0.999)  # torch.optim's


class ShardedRows(nn.Module):
    """A module with blocks of a state that has `size` slots in all: tensors (..., slots, width).

    Blocks are plain attributes, not buffers: DDP would overwrite those of a module inside it with rank 0's. They move
    with `.to()`, and `state_dict()` is collective and returns whole tensors in slot order, so that it loads on any
    number of ranks.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size, self.share = size, local_range(size)
        self.names: list[str] = []

    def add_rows(self, name: str, shape: tuple[int, ...], fill: float | int = 0.0) -> None:
        """An attribute `name`: the slots are the last dimension but one of `shape`, which gives them as -1."""
        dtype = torch.int64 if isinstance(fill, int) else torch.float32
        setattr(self, name, torch.full((*shape[:-2], len(self.share), shape[-1]), fill, dtype=dtype))
        self.names.append(name)

    def bytes(self) -> int:
        """Of all slots, over all ranks."""
        return sum(rows.nbytes // max(1, len(self.share)) * self.size for rows in self.blocks.values())

    @property
    def blocks(self) -> dict[str, Tensor]:
        """What this rank keeps, by name."""
        return {name: getattr(self, name) for name in self.names}

    def reshard(self) -> None:
        """Keep this rank's block only: an objective may be built before the process group. Its first call does this."""
        share = local_range(self.size)
        if share == self.share:
            return
        if len(self.share) != self.size:
            raise RuntimeError(
                "the number of ranks changed since this objective was used; build a new one and load its state_dict"
            )
        for name, rows in self.blocks.items():
            setattr(self, name, rows[..., share.start : share.stop, :].clone())
        self.share = share

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedRows:
        super()._apply(fn, recurse)
        for name, rows in self.blocks.items():
            setattr(self, name, fn(rows))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, rows in self.blocks.items():
            whole = gather_shares(rows.movedim(-2, 0).contiguous(), self.size)
            destination[prefix + name] = whole.movedim(0, -2).clone(memory_format=torch.contiguous_format)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self.share = local_range(self.size)
        others = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in self.names}
        for name, rows in self.blocks.items():
            whole: Tensor | None = state_dict.get(prefix + name)
            expected = (*rows.shape[:-2], self.size, rows.shape[-1])
            if whole is None:
                missing_keys.append(prefix + name)
            elif whole.shape != expected:
                error_msgs.append(f"{prefix}{name} has shape {tuple(whole.shape)}, not {expected}")
            else:
                local = whole[..., self.share.start : self.share.stop, :]
                setattr(self, name, local.to(rows.device, torch.promote_types(rows.dtype, whole.dtype), copy=True))
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


class SampleTable(ShardedRows):
    """A few numbers per sample of the data set, by sample id; NaN where a sample was never written.

    >>> table = SampleTable(1000, columns=2)
    >>> table.write(torch.tensor([3, 7]), torch.tensor([[0.5, -1.0], [0.0, 2.0]]))
    >>> table.read(torch.tensor([7, 8]))
    tensor([[0., 2.],
            [nan, nan]])
    """

    rows: Tensor  # (share of n, columns)

    def __init__(self, size: int, columns: int):
        super().__init__(size)
        self.add_rows("rows", (-1, columns), fill=math.nan)

    def read(self, ids: Tensor) -> Tensor:  # (B,) -> (B, columns)
        """Collective: the same ids on every rank give the same values on every rank."""
        self.check(ids)
        local, slots = self._local(ids)
        values = self.rows[slots] if len(self.rows) else self.rows.new_zeros(len(ids), self.rows.shape[1])
        return sum_over_ranks(torch.where(local[:, None], values, 0.0))  # one owner per row, zeros from the others

    def write(self, ids: Tensor, values: Tensor) -> None:  # (B,), (B, columns)
        """Each rank keeps the rows it owns; negative ids are nobody's. An id that comes twice must come with equal
        values."""
        if not len(self.rows):
            return
        local, slots = self._local(ids)
        # Rows of other ranks go where the first own row goes, with its value; without an own row nothing changes.
        first = local.int().argmax(keepdim=True)
        slots, values = torch.where(local, slots, slots[first]), torch.where(local[:, None], values, values[first])
        self.rows[slots] = torch.where(local.any(), values.to(self.rows.dtype), self.rows[slots])

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the ids this rank owns, and where they are in its rows; the others are somewhere in them."""
        self.reshard()
        local = (ids >= self.share.start) & (ids < self.share.stop)
        return local, torch.where(local, ids - self.share.start, 0)

    def check(self, ids: Tensor) -> None:
        refuse_unless(
            ((ids >= 0) & (ids < self.size)).all(),
            f"a sample id is outside 0..{self.size - 1}, for dataset_size={self.size}; "
            "number the samples from 0 without gaps, or make the objective with the right dataset_size",
        )


def refuse_unless(holds: Tensor, message: str) -> None:  # scalar bool
    """On a GPU without waiting for it. What is tested must be the same on every rank: else the others would wait."""
    if holds.device.type == "cpu" and not holds:
        raise ValueError(message)
    torch._assert_async(holds, message)


@torch.no_grad()
def adagrad_step(weights: Tensor, gradient: Tensor, rate: float, sums: Tensor) -> None:
    if weights.device.type == "cpu":  # in one pass over the weights instead of four
        options: Any = {"weight_decay": 0.0, "lr_decay": 0.0, "eps": ADAGRAD_EPS, "maximize": False, "fused": True}
        adagrad([weights], [gradient], [sums], [torch.zeros(())], lr=rate, **options)
    else:
        sums.addcmul_(gradient, gradient)
        weights.addcdiv_(gradient, sums.sqrt().add_(ADAGRAD_EPS), value=-rate)


@torch.no_grad()
def adam_step(
    weights: Tensor, gradient: Tensor, rate: float, first: Tensor, second: Tensor, steps: Tensor, *, sound: Tensor
) -> None:
    """`steps` counts per row, or for all: what was renewed starts its averages anew. Where the scalar `sound` is 0, for
    a batch without any sound pair, nothing moves, momentum included."""
    beta1, beta2 = ADAM_BETAS
    steps += sound
    first.lerp_(gradient, (1 - beta1) * sound)
    second.lerp_(gradient.square(), (1 - beta2) * sound)
    taken = steps.clamp(min=1)
    root = (second / (1 - beta2**taken)).sqrt_().add_(ADAM_EPS)
    weights.addcdiv_(first * sound, root.mul_(1 - beta1**taken), value=-rate)
