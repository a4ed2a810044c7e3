"""Batches as all ranks read them: bad samples of every rank go into one list, and a rank that cannot read ends all."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from neuclip.data.faults import FaultLog, ReadingFailed, count_unindexed, describe_unindexed, forget_unindexed
from neuclip.data.sample import Batch, Fault
from neuclip.distributed.collectives import all_gather_object, any_rank, is_main, world_size
from neuclip.distributed.error_sync import raise_first, raise_on_main
from neuclip.errors import RunFailed
from neuclip.training.run import Run
from neuclip.training.stopping import StopRequest


class CountedFaults(FaultLog):
    """The same counts without the file: every rank judges alike, and only the main one writes."""

    def _append(self, faults: Sequence[Fault]) -> None:
        pass


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
            if stop.on_any_rank():  # a signal to the whole process group ends the data workers too
                return
            faults = tuple(fault for faults_of_rank in all_gather_object(faults) for fault in faults_of_rank)
            log.add(faults)  # before a failure ends the run
            raise_first(failure)
        if batch is None:
            return
        try:
            log.note(batch._replace(ids=batch.ids.repeat(world_size()), faults=faults))
        except RunFailed as too_many:
            raise_on_main(too_many)
        yield batch


def report_unindexed(log: FaultLog, run: Run) -> None:
    """Pairs that never became samples are listed and printed before the first step, not only after the last."""
    log.note_source(run.source)
    if is_main() and run.source.faults:
        lost = f"at least {count_unindexed(run.source):,} never became samples: {describe_unindexed(run.source)}"
        print(lost, file=sys.stderr)


def _next_or_error(batches: Iterator[Batch]) -> tuple[Batch | None, Exception | None]:
    try:
        return next(batches, None), None
    except Exception as failure:
        return None, failure
