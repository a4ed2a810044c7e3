"""What the loop reads from tokens: a number per caption, by which equal captions are known, and truncated captions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from neuclip.distributed.collectives import sum_over_ranks, world_size

TOO_LONG = 10_000  # words, for any context


def caption_ids(tokens: Tensor) -> Tensor:  # (b, L) -> (b,) int64
    """A random linear form of the tokens, modulo 2^64. Two different captions share a number with a probability below
    1e-14 (token numbers are below 2^17), and never when they differ in one token only, because the factors are odd.

    >>> first, second, third = caption_ids(torch.tensor([[1, 2, 0], [2, 1, 0], [1, 2, 0]])).tolist()
    >>> first == third, first == second
    (True, False)
    """
    return (tokens.long() * _factors(tokens.shape[1], tokens.device)).sum(dim=1)


@cache
def _factors(length: int, device: torch.device) -> Tensor:  # (L,)
    generator = torch.Generator().manual_seed(length)  # the same on every rank
    largest = torch.iinfo(torch.int64).max
    return (torch.randint(-largest, largest, (length,), generator=generator) | 1).to(device)


class TruncatedCaptions:
    """Counts captions that fill the context. One that ends exactly there is counted too: its tokens look the same.

    >>> truncated = TruncatedCaptions(built.tokenize)                                     # doctest: +SKIP
    >>> truncated.add(batch.tokens); truncated.share                                      # doctest: +SKIP
    """

    def __init__(self, tokenize: Callable[[list[str]], Tensor]):
        empty, too_long = tokenize(["", "a " * TOO_LONG])  # (L,), (L,)
        # Not simply the last place: a truncated caption has its end token there, and some tokenizers pad with it.
        self.place = int((empty != too_long).nonzero()[-1])
        self.padding = int(empty[self.place])
        self.truncated = self.total = 0  # on this rank since it was started
        self.before = [0, 0]  # the same two over all ranks, before the run was resumed

    def add(self, tokens: Tensor) -> None:  # (b, L)
        self.truncated += int((tokens[:, self.place] != self.padding).sum())
        self.total += len(tokens)

    @property
    def share(self) -> float | None:
        """Share of truncated captions. Each rank counts its part of `before`, and the mean over ranks is exact."""
        counts = zip((self.truncated, self.total), self.before, strict=True)
        truncated, total = (now + before / world_size() for now, before in counts)
        return truncated / total if total else None

    def sum_over_ranks(self, device: torch.device) -> list[int]:
        """Collective. What a checkpoint keeps, and what `before` is set to when a run is resumed."""
        now = sum_over_ranks(torch.tensor([self.truncated, self.total], device=device)).tolist()
        return [before + more for before, more in zip(self.before, now, strict=True)]
