"""A table by sample id: what a method remembers of every sample of the data set."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuclip.distributed.collectives import gather_shares, local_range, rank, sum_over_ranks, world_size
from neuclip.errors import RunFailed


class SampleTable(nn.Module):
    """A few numbers per sample, on the host whatever the device, spread over ranks by blocks of ids.

    >>> table = SampleTable(1000, ("log_u_image", "log_u_text"))
    >>> table.write(torch.tensor([3, 7]), torch.tensor([[0.5, -1.0], [0.0, 2.0]]))
    >>> table.read(torch.tensor([7, 8]))
    tensor([[0., 2.],
            [nan, nan]])

    NaN means never written. In the table itself zero bytes mean it, so that a sparse file is an empty table of any size
    at once; a zero that was written is kept as minus zero, whose bytes are not zero, so no second array of flags is
    needed. A sample's numbers lie side by side: one page per visit.

    With a `path` the table is a memory-mapped file per rank, `PATH.0-of-2` and so on. It is working memory, made anew
    by each objective; what is to last is in `state_dict()`. Reading and `state_dict()` are collective.
    """

    def __init__(self, size: int, columns: tuple[str, ...], path: str | Path | None = None) -> None:
        super().__init__()
        self.size, self.columns = size, columns
        self.path = str(path) if path else None
        self.dtype = torch.float32
        # Made when first written: the process group may be created after the objective.
        self._rows: Tensor | None = None
        self._share = range(0)

    def read(self, ids: Tensor) -> Tensor:  # (B,) -> (B, columns)
        """The same ids on every rank give the same values on every rank, NaN where never written."""
        self._check(ids)
        if self._rows is None:
            return torch.full((len(ids), len(self.columns)), math.nan, dtype=self.dtype)
        local, row = self._local(ids)
        values = torch.zeros(len(ids), len(self.columns), dtype=self.dtype)
        values[local] = decode(self._rows[row])
        return sum_over_ranks(values)  # one owner per row, zeros from the others

    def write(self, ids: Tensor, values: Tensor) -> None:  # (B,), (B, columns)
        """Each rank keeps the rows it owns. An id that comes twice must come with equal values."""
        self._check(ids)
        rows = self._allocate()
        local, row = self._local(ids)
        rows[row] = encode(values[local].to(self.dtype))

    def change_type(self, dtype: torch.dtype) -> None:
        """Keep everything in `dtype` from now on, at least float32."""
        dtype = torch.promote_types(dtype, torch.float32)
        if dtype == self.dtype:
            return
        self.dtype = dtype
        if self._rows is not None:
            self._rows = self._new_rows().copy_(self._rows)

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the ids this rank owns, and where they are in its rows."""
        if self._share != local_range(self.size):
            raise RuntimeError(
                f"the table of {self.size:,} samples was laid out for another number of ranks than the "
                f"{world_size()} of now; take state_dict() on all of them and load it here"
            )
        local = (ids >= self._share.start) & (ids < self._share.stop)
        return local, ids[local] - self._share.start

    def _check(self, ids: Tensor) -> None:
        outside = ids[(ids < 0) | (ids >= self.size)]
        if len(outside):
            raise ValueError(
                f"sample id {outside[0].item()} is outside 0..{self.size - 1}, for dataset_size={self.size}; "
                "number the samples from 0 without gaps, or make the objective with the right dataset_size"
            )

    def _allocate(self) -> Tensor:
        if self._rows is None:
            self._share = local_range(self.size)
            self._rows = self._new_rows()
        return self._rows

    def _new_rows(self) -> Tensor:
        shape = (len(self._share), len(self.columns))
        if self.path is None or shape[0] == 0:
            return torch.zeros(shape, dtype=self.dtype)
        file = Path(f"{self.path}.{rank()}-of-{world_size()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # A full disk under a mapping kills the process without a message: check before.
            needed, free = math.prod(shape) * self.dtype.itemsize, shutil.disk_usage(file.parent).free
            if needed > free:
                raise OSError(f"{needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free")
            file.unlink(missing_ok=True)  # not emptied: another process may still have it mapped
            return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=self.dtype).view(shape)
        except (OSError, RuntimeError) as error:
            raise RunFailed(f"cannot create the table {file} ({error}); give another table_path") from error

    def _apply(self, fn: Any, recurse: bool = True) -> SampleTable:
        """`.to()`, `.double()` and the like change the type; the table stays on the host."""
        super()._apply(fn, recurse)
        self.change_type(fn(torch.empty(0, dtype=self.dtype)).dtype)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for column, name in enumerate(self.columns):
            if self._rows is None:
                values = torch.full((self.size,), math.nan, dtype=self.dtype)
            else:
                self._local(torch.empty(0, dtype=torch.int64))  # raises if the number of ranks changed
                values = gather_shares(decode(self._rows[:, column]), self.size)
            destination[prefix + name] = values

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        keys = [prefix + name for name in self.columns]
        missing = [key for key in keys if key not in state_dict]
        missing_keys += missing
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in keys]
        if missing:
            return
        sizes = {len(state_dict[key]) for key in keys}
        if sizes != {self.size}:
            given = " and ".join(str(size) for size in sorted(sizes))
            error_msgs.append(f"the table is of {given} samples; this objective was made with dataset_size={self.size}")
            return
        for key in keys:
            self.change_type(torch.promote_types(self.dtype, state_dict[key].dtype))
        self._rows = None  # a later load may come on another number of ranks
        rows = self._allocate()
        for column, key in enumerate(keys):
            rows[:, column] = encode(state_dict[key][self._share.start : self._share.stop].to(rows.dtype))


def encode(values: Tensor) -> Tensor:
    """Zero becomes minus zero, NaN becomes zero."""
    return torch.where(values == 0, -0.0, values).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)


def decode(values: Tensor) -> Tensor:
    """The inverse: zero becomes NaN, minus zero becomes zero."""
    never = (values == 0) & ~values.signbit()
    return torch.where(never, math.nan, values) + 0.0  # minus zero plus zero is zero
