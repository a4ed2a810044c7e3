"""The state of a method: rows in slots that are spread over ranks, a table by sample id, and in-place versions of
torch.optim's AdaGrad and Adam for tensors that are no parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adagrad import adagrad

from neuclip.distributed.collectives import gather_shares, local_range, sum_over_ranks

ADAGRAD_EPS, ADAM_EPS, ADAM_BETAS = 1e-10, 1e-8, (0.9, 0.999)  # torch.optim's


class ShardedRows(nn.Module):
    """A module with a state of `size` slots, tensors (..., slots, width), of which each rank keeps a block.

    Blocks are plain attributes, not buffers: DDP overwrites buffers inside it with those of rank 0. They move with
    `.to()`. `state_dict()` is collective and returns the complete tensors in slot order, so that it loads on any number
    of ranks.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size, self.share = size, local_range(size)
        self.names: list[str] = []

    def add_rows(self, name: str, shape: tuple[int, ...], fill: float | int = 0.0) -> None:
        """Add the tensor `name` of this `shape`. The last dimension but one, given as -1, is that of the slots."""
        dtype = torch.int64 if isinstance(fill, int) else torch.float32
        setattr(self, name, torch.full((*shape[:-2], len(self.share), shape[-1]), fill, dtype=dtype))
        self.names.append(name)

    def bytes(self) -> int:
        """Bytes of all slots, over all ranks."""
        return sum(rows.nbytes // max(1, len(self.share)) * self.size for rows in self.blocks.values())

    @property
    def blocks(self) -> dict[str, Tensor]:
        """The tensors that this rank keeps, by name."""
        return {name: getattr(self, name) for name in self.names}

    def reshard(self) -> None:
        """Keep only this rank's block. Called at the first use: an objective may be built before the process group."""
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
            all_rows = gather_shares(rows.movedim(-2, 0).contiguous(), self.size)
            destination[prefix + name] = all_rows.movedim(0, -2).clone(memory_format=torch.contiguous_format)

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
            saved: Tensor | None = state_dict.get(prefix + name)
            expected = (*rows.shape[:-2], self.size, rows.shape[-1])
            if saved is None:
                missing_keys.append(prefix + name)
            elif saved.shape != expected:
                error_msgs.append(f"{prefix}{name} has shape {tuple(saved.shape)}, not {expected}")
            else:
                local = saved[..., self.share.start : self.share.stop, :]
                setattr(self, name, local.to(rows.device, torch.promote_types(rows.dtype, saved.dtype), copy=True))
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


class SampleTable(ShardedRows):
    """A few numbers per sample of the data set, by sample id; NaN for samples that were never written.

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
        """The rows of these ids. Collective: all ranks pass the same ids and get the same rows."""
        self.check(ids)
        local, slots = self._local(ids)
        values = self.rows[slots] if len(self.rows) else self.rows.new_zeros(len(ids), self.rows.shape[1])
        return sum_over_ranks(torch.where(local[:, None], values, 0.0))  # one owner per row, zeros from the others

    def write(self, ids: Tensor, values: Tensor) -> None:  # (B,), (B, columns)
        """Write the rows that this rank owns. No rank owns negative ids. An id that comes twice has equal values."""
        if not len(self.rows):
            return
        local, slots = self._local(ids)
        # Shapes are fixed, to avoid a wait for the device: in place of a row of another rank, the first own row is
        # written once more. Without an own row, slot 0 is written with its old value.
        first = local.int().argmax(keepdim=True)
        slots, values = torch.where(local, slots, slots[first]), torch.where(local[:, None], values, values[first])
        self.rows[slots] = torch.where(local.any(), values.to(self.rows.dtype), self.rows[slots])

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the ids this rank owns, and their slots in its rows; for other ids slot 0."""
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
    """Raise unless `holds`: a ValueError on a CPU, on a GPU a device assertion, which does not make the host wait. All
    ranks must have the same `holds`; otherwise the ranks that go on would wait for the one that fails."""
    if holds.device.type == "cpu" and not holds:
        raise ValueError(message)
    torch._assert_async(holds, message)


@torch.no_grad()
def adagrad_step(weights: Tensor, gradient: Tensor, rate: float, sums: Tensor) -> None:
    if weights.device.type == "cpu":  # torch's fused version makes one pass over the weights instead of four
        options: Any = {"weight_decay": 0.0, "lr_decay": 0.0, "eps": ADAGRAD_EPS, "maximize": False, "fused": True}
        adagrad([weights], [gradient], [sums], [torch.zeros(())], lr=rate, **options)
    else:
        sums.addcmul_(gradient, gradient)
        weights.addcdiv_(gradient, sums.sqrt().add_(ADAGRAD_EPS), value=-rate)


@torch.no_grad()
def adam_step(
    weights: Tensor, gradient: Tensor, rate: float, first: Tensor, second: Tensor, steps: Tensor, *, sound: Tensor
) -> None:
    """Take an Adam step in place. `steps` counts the steps of each row, or of all rows: a renewed row starts at 0. If
    the scalar `sound` is 0, because the batch has no sound pair, nothing moves, not even by momentum."""
    beta1, beta2 = ADAM_BETAS
    steps += sound
    first.lerp_(gradient, (1 - beta1) * sound)
    second.lerp_(gradient.square(), (1 - beta2) * sound)
    taken = steps.clamp(min=1)
    root = (second / (1 - beta2**taken)).sqrt_().add_(ADAM_EPS)
    weights.addcdiv_(first * sound, root.mul_(1 - beta1**taken), value=-rate)
