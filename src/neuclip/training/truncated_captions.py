"""Captions that fill the model's context: what is longer is cut off there, and nobody would hear of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from neuclip.distributed.collectives import sum_over_ranks, world_size

TOO_LONG = 10_000  # words, for any context


class TruncatedCaptions:
    """Counts them. One that ends exactly where the context does is counted too: tokens do not tell it from a cut one.

    >>> full = TruncatedCaptions(built.tokenize)                                          # doctest: +SKIP
    >>> full.note(batch.tokens); full.share                                               # doctest: +SKIP
    """

    def __init__(self, tokenize: Callable[[list[str]], Tensor]):
        empty, too_long = tokenize(["", "a " * TOO_LONG])  # (L,), (L,)
        # Not simply the last place: there a cut caption has its end token, which some tokenizers also fill up with.
        self.place = int((empty != too_long).nonzero()[-1])
        self.filling = int(empty[self.place])
        self.full = self.all = 0  # that this process has seen since it was started
        self.before = [0, 0]  # the same two, of all processes of earlier sittings

    def note(self, tokens: Tensor) -> None:  # (b, L)
        self.full += int((tokens[:, self.place] != self.filling).sum())
        self.all += len(tokens)

    @property
    def share(self) -> float | None:
        """Of all captions so far; the mean over processes is that of all. What was before counts in each in part."""
        full, of = (now + then / world_size() for now, then in zip((self.full, self.all), self.before, strict=True))
        return full / of if of else None

    def all_gather_counts(self, device: torch.device) -> list[int]:
        """Collective. What a checkpoint keeps, and `before` is set to by a resumed run."""
        now = sum_over_ranks(torch.tensor([self.full, self.all], device=device)).tolist()
        return [before + more for before, more in zip(self.before, now, strict=True)]
