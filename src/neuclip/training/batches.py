"""Batches as all ranks read them: bad samples of every rank go into one list, and a rank that cannot read ends all.
And what the loop reads from tokens: a number per caption, by which equal captions are known, and truncated captions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from neuclip.data.faults import FaultLog, count_unindexed, describe_unindexed
from neuclip.data.loader import Batch
from neuclip.distributed.collectives import all_gather_object, any_rank, is_main, sum_over_ranks, world_size
from neuclip.distributed.connection import is_lost_connection
from neuclip.distributed.error_sync import raise_first, raise_on_main, sync_errors
from neuclip.distributed.stopping import StopRequest, interruptible
from neuclip.errors import RunFailed

if TYPE_CHECKING:
    from neuclip.training.run import Run

TOO_LONG = 10_000  # words, for any context


def open_fault_log(run: Run) -> FaultLog:
    """Every rank counts, so that all judge alike, and only the main one writes."""
    share = run.settings.data.max_bad_share
    if not is_main():
        return FaultLog(None, share)
    run.folder.skipped.touch()  # an empty file says that nothing was skipped
    return FaultLog(run.folder.skipped, share)


class BatchReader:
    """This rank's batches of the rest of a run, one after the other. Collective; costs one byte per step unless a
    sample is bad. Where reading fails, all ranks end after the same step, and `save` is called first."""

    def __init__(self, run: Run, stop: StopRequest, save: Callable[[], object]):
        self.stop, self.save = stop, save
        self.log, self.batches = open_fault_log(run), run.remaining_batches()
        self.log.add(run.source.faults)
        if is_main() and run.source.faults:  # before the first step, not only after the last
            lost = f"at least {count_unindexed(run.source):,} could not be indexed: {describe_unindexed(run.source)}"
            print(lost, file=sys.stderr)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            batch = self._read()
        except (Exception, SystemExit) as error:
            if not is_lost_connection(error):
                self.save()
            raise
        if batch is None:
            raise StopIteration
        return batch

    def _read(self) -> Batch | None:
        """None after the last, or when the run is asked to stop."""
        batch, failure = self._next_or_error()
        faults = batch.faults if batch else ()
        if any_rank(failure is not None or bool(faults)):
            if self.stop.on_any_rank():  # it interrupted the wait; to the whole process group, it ended the workers too
                return None
            faults = tuple(fault for faults_of_rank in all_gather_object(faults) for fault in faults_of_rank)
            with self.stop.shielded(), sync_errors():
                self.log.add(faults)  # before a failure ends the run
            raise_first(failure)
        if batch is not None and (message := self.log.note(len(batch.ids) * world_size(), len(faults))):
            raise_on_main(RunFailed(message))
        return batch

    def _next_or_error(self) -> tuple[Batch | None, BaseException | None]:
        """A request to stop interrupts the wait: a worker that hangs would make it endless."""
        try:
            with interruptible():
                return next(self.batches, None), None
        except (Exception, KeyboardInterrupt) as failure:
            return None, failure


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
