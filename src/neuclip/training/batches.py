"""Batches as all processes read them: bad samples of all are listed in one place, and who cannot read on ends all."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from neuclip.data.faults import FaultLog, count_unindexed, describe_unindexed, forget_unindexed
from neuclip.data.sample import Batch, Fault
from neuclip.distributed.collectives import any_rank, is_main, world_size
from neuclip.distributed.error_sync import all_gather_str, raise_first, raise_together
from neuclip.errors import RunFailed
from neuclip.training.run import Run
from neuclip.training.stopping import StopRequest


class CountedFaults(FaultLog):
    """The same counting without the file, so that every process judges alike while the main one writes."""

    def _append(self, faults: Sequence[Fault]) -> None:
        pass


def fault_log(run: Run) -> FaultLog:
    share = run.settings.data.max_bad_share
    if is_main():
        run.folder.skipped.touch()  # that it is empty says that nothing was skipped
        return FaultLog(run.folder.skipped, share)
    return CountedFaults(run.folder.skipped.with_suffix(".nowhere"), share)


def read_batches(run: Run, stop: StopRequest) -> Iterator[Batch]:
    """This process's batches. Collective; costs one byte per step unless a sample is bad."""
    if is_main() and run.folder.skipped.exists():
        forget_unindexed(run.folder.skipped)
    log, batches = fault_log(run), run.batches()
    note_unindexed(log, run)
    while True:
        batch, failure = _next(batches)
        faults = batch.faults if batch else getattr(failure, "faults", ())
        if any_rank(failure is not None or bool(faults)):
            if stop.anywhere():  # a signal to the whole group of processes ends the data workers too
                return
            texts = all_gather_str(json.dumps(faults), run.device)
            faults = tuple(Fault(*fault) for text in texts for fault in json.loads(text))
            log.add(faults)  # before a failure ends the run
            raise_first(failure)
        if batch is None:
            return
        try:
            log.note(batch._replace(ids=batch.ids.repeat(world_size()), faults=faults))
        except RunFailed as too_many:
            raise_together(too_many)
        yield batch


def note_unindexed(log: FaultLog, run: Run) -> None:
    """What never became a sample is told before the first step, not only after the last."""
    log.note_source(run.source)
    if is_main() and run.source.faults:
        lost = f"at least {count_unindexed(run.source):,} never became samples: {describe_unindexed(run.source)}"
        print(lost, file=sys.stderr)


def _next(batches: Iterator[Batch]) -> tuple[Batch | None, Exception | None]:
    try:
        return next(batches, None), None
    except Exception as failure:
        return None, failure
