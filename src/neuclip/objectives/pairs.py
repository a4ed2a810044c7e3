"""The batch as every objective sees it: both sides in one tensor, gathered over ranks, cast and cleaned once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from neuclip.distributed.collectives import gather_values, rank

STRIP = {"cpu": 2**22}  # similarities in memory at a time: 16 MB in float32, about what a CPU caches
LARGE_STRIP = 2**24  # on other devices: 64 MB in float32, few launches
KEPT = 2**25  # up to so many similarities are kept for the backward pass; larger batches compute them again
LOWEST = -1e30  # the similarity of a masked candidate: its exponential is 0, and unlike -inf, 0 times it is not NaN
NO_KEY = -1  # a key that no pair has


@dataclass(frozen=True)
class Pairs:
    """This rank's anchors and the candidates of the whole global batch, in float32 or wider.

    Side 0 is images, side 1 is texts; an anchor's candidates are the rows of the other side. Candidates are values: no
    gradient travels back through the gather (`objectives/contrast.py`).

    A pair is *sound* if its features are finite and not all zero. Unsound pairs have zero features here, are candidates
    of no anchor, and change no state.
    """

    features: Tensor  # (2, b, d) with graph
    positive: Tensor  # (b,) with graph: the similarity of each pair
    all_features: Tensor  # (2, B, d)
    sound: Tensor  # (B,) bool
    all_finite: Tensor  # scalar bool: the features of all ranks and the temperature are finite
    keys: Tensor  # (k, B) int64: pairs with an equal key are no negatives of each other; row 0 is the sample's key
    sample_ids: Tensor | None = None  # (B,)
    logit_bias: Tensor | None = None  # scalar, with graph; only SigLIP uses it

    @cached_property
    def all_positive(self) -> Tensor:  # (B,)
        return torch.linalg.vecdot(*self.all_features)

    @property
    def batch(self) -> int:
        """B, the size of the global batch."""
        return self.all_features.shape[1]

    @cached_property
    def local(self) -> slice:
        """This rank's rows of the global batch."""
        b = self.features.shape[1]
        return slice(rank() * b, rank() * b + b)

    @cached_property
    def num_excluded(self) -> Tensor:  # (b,) at least 1: an anchor's own positive is excluded
        count = torch.empty_like(self.keys[0, self.local])
        for rows in self._strip_rows():
            torch.sum(self._excluded(rows), dim=1, out=count[rows])
        return count

    @property
    def negatives(self) -> Tensor:  # (b,)
        """The number of negatives, over which an anchor's normalizer is a mean. 1 if there are none: then g is 0."""
        return (self.batch - self.num_excluded).clamp(min=1).to(self.features.dtype)

    @torch.no_grad()
    def strips(self, sides: int = 2) -> Iterator[tuple[slice, Tensor]]:  # (sides, c, B) each
        """Iterate over strips of anchors: their rows, and their similarities to all candidates, LOWEST for candidates
        that are no negatives. The similarities have no graph and are valid until the next strip. Up to KEPT numbers are
        computed once and kept; more are computed at each visit, in a buffer that grows with B and not with b B."""
        scratch = None
        for rows in self._strip_rows():
            similarity = self._kept.get(rows.start)
            if similarity is None:
                if scratch is None or self._keeps:
                    scratch = self.features.new_empty(sides, rows.stop - rows.start, self.batch)
                similarity = scratch[:, : rows.stop - rows.start]
                torch.mm(self.features[0, rows], self.all_features[1].T, out=similarity[0])
                if sides == 2 and rows == slice(0, self.batch):  # one rank, one strip: the same numbers
                    similarity[1] = similarity[0].T
                elif sides == 2:
                    torch.mm(self.features[1, rows], self.all_features[0].T, out=similarity[1])
                similarity.masked_fill_(self._excluded(rows), LOWEST)
            if self._keeps:
                self._kept[rows.start] = similarity
            yield rows, similarity

    def forget(self) -> None:
        """Free the similarities that `strips` has kept. The loss holds these pairs until the next step."""
        self._kept.clear()

    @cached_property
    def _kept(self) -> dict[int, Tensor]:
        return {}

    @property
    def _keeps(self) -> bool:
        return 2 * self.features.shape[1] * self.batch <= KEPT

    def _strip_rows(self) -> Iterator[slice]:
        count = self.features.shape[1]
        height = strip_height(count, 2 * self.batch, self.features.device)
        return (slice(start, min(start + height, count)) for start in range(0, count, height))

    def _excluded(self, rows: slice) -> Tensor:  # (c, B) bool
        excluded = ~self.sound
        for key in self.keys:
            excluded = excluded | (key[self.local][rows, None] == key)
        return excluded


def strip_height(count: int, width: int, device: torch.device) -> int:
    """The number of rows of a strip, at most `count`, if each row has `width` numbers."""
    return min(count, max(1, STRIP.get(device.type, LARGE_STRIP) // max(1, width)))


def gather_sides(values: Tensor) -> Tensor:  # (2, b, ...) -> (2, B, ...)
    """The columns of all ranks, in rank order, without gradient."""
    return gather_values(values.transpose(0, 1)).transpose(0, 1)


def gather_pairs(
    image: Tensor,  # (b, d)
    text: Tensor,  # (b, d)
    *,
    dtype: torch.dtype,
    valid: Tensor,  # scalar bool: whether the temperature is finite and positive
    first_key: int = 0,
    sample_ids: Tensor | None = None,  # (b,)
    caption_ids: Tensor | None = None,  # (b,)
    logit_bias: Tensor | None = None,
) -> Pairs:
    """The pairs of all ranks. Features are sent in their own dtype (bf16 stays bf16) and then cast to `dtype`.

    Without `sample_ids` the pairs of a batch get unique keys, counted from `first_key` on: negative ones, unlike ids.
    """
    features = torch.stack([image, text])
    with torch.no_grad():  # one row with NaN would make every sum NaN
        finite = features.sum(dim=2, dtype=dtype).isfinite().all(dim=0) & valid
        sound = finite & features.any(dim=2).all(dim=0)
        features.masked_fill_(~finite[:, None], 0.0)  # only the values: the gradient is NaN, like the loss
    features = features.masked_fill(~sound[:, None] & finite[:, None], 0.0)
    columns = [finite.int() + sound, *(keys for keys in (sample_ids, caption_ids) if keys is not None)]
    table = gather_values(torch.stack([column.to(image.device, torch.int64) for column in columns], dim=1))
    quality, *keys = table.unbind(dim=1)  # 0: NaN or infinite, 1: zeros, 2: sound
    all_features = gather_sides(features.detach()).to(dtype)
    sample_ids = keys[0] if sample_ids is not None else None
    if sample_ids is None:
        keys.insert(0, NO_KEY - 1 - first_key - torch.arange(all_features.shape[1], device=image.device))
    features = features.to(dtype)
    return Pairs(
        features=features,
        positive=torch.linalg.vecdot(*features),
        all_features=all_features,
        sound=quality == 2,
        all_finite=(quality > 0).all(),
        keys=torch.stack(keys),
        sample_ids=sample_ids,
        logit_bias=None if logit_bias is None else logit_bias.to(dtype),
    )
