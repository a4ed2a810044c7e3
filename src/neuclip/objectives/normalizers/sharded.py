"""State that has one row per slot, cut into blocks: each process keeps its own, `state_dict` holds them all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from neuclip.distributed import gather_shares, my_share


class ShardedRows(nn.Module):
    """A module whose buffers are blocks of rows of a state with `size` rows.

    `state_dict()` is collective and answers whole tensors in slot order, so that it loads on any number of processes.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.share = my_share(size)

    def add_rows(self, name: str, *shape: int, fill: float | int = 0.0) -> None:
        """A buffer `name` with rows of `shape`: of float32, or of int64 where `fill` is an int."""
        dtype = torch.int64 if isinstance(fill, int) else torch.float32
        self.register_buffer(name, torch.full((len(self.share), *shape), fill, dtype=dtype))

    def follow_processes(self) -> None:
        """An objective may be built before the processes have met; it keeps its block from the first call on."""
        share = my_share(self.size)
        if share == self.share:
            return
        if len(self.share) != self.size:
            raise RuntimeError(
                "the number of processes changed since this objective was used; build a new one and load its state_dict"
            )
        for name, rows in list(self.named_buffers(recurse=False)):
            self.register_buffer(name, rows[share.start : share.stop].clone())
        self.share = share

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, rows in self.named_buffers(recurse=False):
            destination[prefix + name] = gather_shares(rows.detach(), self.size).clone()

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        _strict, missing, unexpected, errors = args[1:]
        names = {name for name, _ in self.named_buffers(recurse=False)}
        self.share = my_share(self.size)
        for name in sorted(names):
            whole: Tensor | None = state.get(prefix + name)
            mine = self.get_buffer(name)
            if whole is None:
                missing.append(prefix + name)
            elif whole.shape != (self.size, *mine.shape[1:]):
                errors.append(f"{prefix}{name} has shape {tuple(whole.shape)}, not {(self.size, *mine.shape[1:])}")
            else:
                rows = whole[self.share.start : self.share.stop].to(mine.device, mine.dtype, copy=True)
                self.register_buffer(name, rows)
        mine_only = (key for key in state if key.startswith(prefix) and key[len(prefix) :] not in names)
        unexpected.extend(key for key in mine_only if "." not in key[len(prefix) :])
