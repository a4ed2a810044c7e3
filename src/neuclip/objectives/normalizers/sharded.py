"""State that has one row per slot, cut into blocks: each rank keeps its own, `state_dict` holds them all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from neuclip.distributed.collectives import gather_shares, local_range


class ShardedRows(nn.Module):
    """A module with blocks of rows of a state that has `size` rows in all.

    Blocks are plain attributes, not buffers: DDP would overwrite those of a module inside it with rank 0's. They
    move with `.to()`, and `state_dict()` is collective and returns whole tensors in slot order, so that it loads on any
    number of ranks.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.share = local_range(size)
        self.names: list[str] = []

    def add_rows(self, name: str, *shape: int, fill: float | int = 0.0) -> None:
        """An attribute `name` with rows of `shape`: of float32, or of int64 where `fill` is an int."""
        dtype = torch.int64 if isinstance(fill, int) else torch.float32
        self.names.append(name)
        setattr(self, name, torch.full((len(self.share), *shape), fill, dtype=dtype))

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
        for name, rows in self.blocks().items():
            setattr(self, name, rows[share.start : share.stop].clone())
        self.share = share

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedRows:
        super()._apply(fn, recurse)
        for name, rows in self.blocks().items():
            setattr(self, name, fn(rows))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, rows in self.blocks().items():
            destination[prefix + name] = gather_shares(rows.detach(), self.size).clone()

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
        for name, rows in self.blocks().items():
            whole: Tensor | None = state_dict.get(prefix + name)
            expected = (self.size, *rows.shape[1:])
            if whole is None:
                missing_keys.append(prefix + name)
            elif whole.shape != expected:
                error_msgs.append(f"{prefix}{name} has shape {tuple(whole.shape)}, not {expected}")
            else:
                setattr(self, name, whole[self.share.start : self.share.stop].to(rows.device, rows.dtype, copy=True))
        others = (key for key in state_dict if key.startswith(prefix) and key[len(prefix) :] not in self.names)
        unexpected_keys.extend(others)
