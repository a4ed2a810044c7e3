"""Captions that fill the model's context: what is longer is cut off there, and nobody would hear of it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

TOO_LONG = 10_000  # words, for any context


class FullCaptions:
    """Counts them. One that ends exactly where the context does is counted too: tokens do not tell it from a cut one.

    >>> full = FullCaptions(built.tokenize)                                                         # doctest: +SKIP
    >>> full.note(batch.tokens); full.share                                                         # doctest: +SKIP
    """

    def __init__(self, tokenize: Callable[[list[str]], Tensor]):
        empty, too_long = tokenize(["", "a " * TOO_LONG])  # (L,), (L,)
        # Not simply the last place: there a cut caption has its end token, which some tokenizers also fill up with.
        self.place = int((empty != too_long).nonzero()[-1])
        self.filling = int(empty[self.place])
        self.full = self.all = 0

    def note(self, tokens: Tensor) -> None:  # (b, L)
        self.full += int((tokens[:, self.place] != self.filling).sum())
        self.all += len(tokens)

    @property
    def share(self) -> float | None:
        """Of all captions so far."""
        return self.full / self.all if self.all else None
