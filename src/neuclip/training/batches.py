"""Batches as all ranks read them: bad samples of every rank go into one list, and a rank that cannot read ends all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

from neuclip.data.faults import FaultLog, ReadingFailed, count_unindexed, describe_unindexed, forget_unindexed
from neuclip.data.sample import Batch, Fault
from neuclip.distributed.collectives import all_gather_object, any_rank, is_main, world_size
from neuclip.distributed.connection import is_lost_connection
from neuclip.distributed.error_sync import raise_first, raise_on_main, sync_errors
from neuclip.distributed.stopping import StopRequest, interruptible
from neuclip.errors import RunFailed
from neuclip.training.run import Run


class CountedFaults(FaultLog):
    """The same counts without the file: every rank judges alike, and only the main one writes."""

    def add(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            self._remember(fault)


def open_fault_log(run: Run) -> FaultLog:
    share = run.settings.data.max_bad_share
    if is_main():
        run.folder.skipped.touch()  # an empty file says that nothing was skipped
        return FaultLog(run.folder.skipped, share)
    return CountedFaults(run.folder.skipped.with_suffix(".nowhere"), share)


def read_batches(run: Run, stop: StopRequest) -> Iterator[Batch]:
    """This rank's batches. Collective; costs one byte per step unless a sample is bad."""
    if is_main() and run.folder.skipped.exists():
        forget_unindexed(run.folder.skipped)
    log, batches = open_fault_log(run), run.remaining_batches()
    report_unindexed(log, run)
    while True:
        batch, failure = _next_or_error(batches)
        faults = batch.faults if batch else failure.faults if isinstance(failure, ReadingFailed) else ()
        if any_rank(failure is not None or bool(faults)):
            if stop.on_any_rank():  # it interrupted the wait; to the whole process group, it ended the data workers too
                return
            faults = tuple(fault for faults_of_rank in all_gather_object(faults) for fault in faults_of_rank)
            with stop.shielded(), sync_errors():
                log.add(faults)  # before a failure ends the run
            raise_first(failure)
        if batch is None:
            return
        try:
            log.note(batch._replace(ids=batch.ids.repeat(world_size()), faults=faults))
        except RunFailed as too_many:
            raise_on_main(too_many)
        yield batch


def save_if_reading_fails(batches: Iterator[Batch], save: Callable[[], object]) -> Iterator[Batch]:
    """Errors of `read_batches` end all ranks after the same step, so that all can save together first; except a rank
    that is lost."""
    try:
        yield from batches
    except (Exception, SystemExit) as error:
        if not is_lost_connection(error):
            save()
        raise


def report_unindexed(log: FaultLog, run: Run) -> None:
    """Pairs that could not be indexed are listed and printed before the first step, not only after the last."""
    log.note_source(run.source)
    if is_main() and run.source.faults:
        lost = f"at least {count_unindexed(run.source):,} could not be indexed: {describe_unindexed(run.source)}"
        print(lost, file=sys.stderr)


def _next_or_error(batches: Iterator[Batch]) -> tuple[Batch | None, BaseException | None]:
    """A request to stop interrupts the wait: a worker that hangs would make it endless."""
    try:
        with interruptible():
            return next(batches, None), None
    except (Exception, KeyboardInterrupt) as failure:
        return None, failure
