"""The training loop, with the line numbers of Algorithm 1 of the paper.

train         line 1: for each step
              line 2: read a batch, `BatchReader.read`
take_step     the encoders: features of the batch
              lines 3 to 10, and the loss of line 11: the objective (`NeuCLIP.loss`)
              lines 11 and 12: gradient and update, `TowerOptimizer.update`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from neuclip.data.faults import FaultLog, count_unindexed, describe_unindexed
from neuclip.data.loader import Batch
from neuclip.distributed.collectives import all_gather_object, any_rank, is_main, world_size
from neuclip.distributed.ranks import (
    StopRequest,
    interruptible,
    is_lost_connection,
    raise_first,
    raise_on_main,
    sync_errors,
)
from neuclip.errors import RunFailed
from neuclip.files import append_text
from neuclip.progress import say
from neuclip.training.large_batch import LargeBatch
from neuclip.training.observer import Observer
from neuclip.training.optimizer import NotFinite
from neuclip.training.run import Run

Phase = Callable[[str], AbstractContextManager[object]]


def train(run: Run, stop: StopRequest, *, evaluate: Callable[[Run], object], save: Callable[[Run], object]) -> None:
    """Train from the step that the run has reached to the end of its budget. `evaluate` and `save` write to its folder.

    Collective: every rank runs this loop on its rows of each batch, and all ranks leave it after the same step.
    """
    settings, plan, encode = run.settings, run.plan, parallel(run)
    evaluations = Interval(settings.evaluation.every)
    checkpoints = Interval(settings.checkpoint.every_samples, minutes=settings.checkpoint.every_minutes)
    with Observer(run) as observer:
        batches = BatchReader(run, stop, save)
        if settings.evaluation.at_start and run.step == 0:
            evaluate(run)
        while run.step < plan.steps:  # line 1
            with observer.phase("data"):
                batch = batches.read()  # line 2
            if batch is None:  # the run was asked to stop
                break
            run.objective.measures = observer.logs_at(run.step + 1)
            loss, gradient_norm = take_step(run, encode, batch, observer.phase)  # lines 3 to 12
            run.step += 1
            observer.record(loss, gradient_norm, batch.tokens)
            if evaluations.passed(run) and run.step < plan.steps:
                save(run)  # if a signal or missing data end the evaluation, no step is lost
                evaluate(run)
                observer.restart_clock()
            if any_rank(bool(stop.signal) or checkpoints.passed(run) or run.step in plan.milestones):
                if stop.on_any_rank():
                    break
                save(run)
                observer.restart_clock()
    save(run)
    if stop.on_any_rank():
        raise KeyboardInterrupt


def take_step(
    run: Run, encode: nn.Module, batch: Batch, phase: Phase = lambda _: nullcontext()
) -> tuple[Tensor, Tensor]:
    """Update towers and objective once. Returns the loss of this rank's rows and the norm of the gradient. Collective.

    `encode` is `parallel(run)`. If the loss or the gradient is NaN or infinite, the run fails before the update.
    """
    images, tokens, ids = (x.to(run.device, non_blocking=True) for x in batch[:3])
    texts = tokens if batch.text_features is None else batch.text_features.to(run.device, non_blocking=True)
    if not run.built.towers.training:  # an evaluation has put them into eval mode
        run.built.towers.train()
    with phase("towers"), torch.autocast(run.device.type, run.precision, enabled=run.precision != torch.float32):
        image, text, *scale_and_bias = encode(images, texts)  # the embeddings e_1 and e_2 of the batch
    with phase("normalizer"):  # lines 3 to 10, and the loss of line 11
        loss = run.objective(image, text, *scale_and_bias, sample_ids=ids, caption_ids=caption_ids(tokens))
    with phase("towers"):
        try:
            return loss, run.optimizer.update(loss, run.step)  # lines 11 and 12
        except NotFinite as error:
            raise_on_main(RunFailed(explain_not_finite(run, str(error), batch)), cause=error)


def parallel(run: Run) -> nn.Module:
    """The towers as the loop calls them: in chunks, and on several ranks inside DDP, which averages gradients."""
    towers = run.built.towers.train()
    run.objective.train()
    encode = LargeBatch(towers, micro_batch_size=run.plan.micro_batch)
    if world_size() == 1:
        return encode
    # DDP sends the main rank's buffers before every forward pass. Those of locked towers never change: leave them out.
    locked = {id(buffer) for module in towers.in_eval for buffer in module.buffers()}
    names = [name for name, buffer in encode.named_buffers() if id(buffer) in locked]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(encode, names)
    return DistributedDataParallel(encode)


def explain_not_finite(run: Run, what: str, batch: Batch) -> str:
    """The error message for a loss or gradient that is NaN or infinite. The run saves no checkpoint in this case:
    the objective's state may contain NaN, and the weights may be broken."""
    ids = ", ".join(str(i) for i in batch.ids[:8].tolist())
    # The newest checkpoint may have been saved just after the update that broke the weights.
    move = f"move the newest file of {run.folder.checkpoints} away to continue from the one before, or "
    return (
        f"NaN or infinity at step {run.step} ({what}; sample ids {ids}, ...); stopped before the update; "
        f"{move if 0 < run.step == run.saved_step else ''}start a new run with a lower --optimizer.learning_rate, or "
        "check these samples"
    )


class BatchReader:
    """Reads this rank's batches from the step that the run has reached, and lists the bad samples of all ranks. If
    reading fails on one rank, `save` is called and all ranks end after the same step."""

    def __init__(self, run: Run, stop: StopRequest, save: Callable[[Run], object]):
        self.run, self.stop, self.save = run, stop, save
        # Every rank counts bad samples, so that all reach the same decision. Only the main rank writes the list.
        run.faults = FaultLog(run.folder.skipped if is_main() else None, run.settings.data.max_bad_share)
        if is_main():
            append_text(run.folder.skipped, "")  # an empty file says that no sample was skipped
            if run.source.faults:  # tell the user before the first step, not only after the last
                reasons = describe_unindexed(run.source)
                say(f"at least {count_unindexed(run.source):,} could not be indexed: {reasons}")
        run.faults.add(run.source.faults)
        self.batches = run.remaining_batches()

    def read(self) -> Batch | None:
        """The next batch; None if the run was asked to stop. Collective: sends one number per step, and more only for
        bad samples."""
        try:
            return self._read()
        except (Exception, SystemExit) as error:
            if not is_lost_connection(error):
                self.save(self.run)
            raise

    def _read(self) -> Batch | None:
        batch, failure = None, None
        try:
            with interruptible():  # so that a signal ends the wait for a worker that hangs
                batch = next(self.batches)
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        faults = batch.faults if batch else ()
        if any_rank(failure is not None or bool(faults)):
            # A signal looks like a failure here: it interrupts the wait, or it has killed the data workers too.
            if self.stop.on_any_rank():
                return None
            faults = tuple(fault for faults_of_rank in all_gather_object(faults) for fault in faults_of_rank)
            with sync_errors(may_stop=False):
                self.run.faults.add(faults)  # listed even if the failure ends the run
            raise_first(failure)
        assert batch is not None
        if message := self.run.faults.note(len(batch.ids) * world_size(), len(faults)):
            raise_on_main(RunFailed(message))
        return batch


class Interval:
    """Tells when something is due: each time the run passes a multiple of `samples`, or after `minutes`. 0: never."""

    def __init__(self, samples: int, *, minutes: float = 0.0):
        self.samples, self.seconds = samples, 60 * minutes
        self.last_time = time.monotonic()

    def passed(self, run: Run) -> bool:
        """Whether it is due now; call it once at the end of each step. Only the main rank looks at its clock, because
        clocks differ; it tells the other ranks (`any_rank`)."""
        before = run.samples - run.plan.batch_size
        by_samples = bool(self.samples) and run.samples // self.samples > before // self.samples
        by_time = bool(self.seconds) and is_main() and time.monotonic() - self.last_time >= self.seconds
        if by_samples or by_time:
            self.last_time = time.monotonic()
        return by_samples or by_time


def caption_ids(tokens: Tensor) -> Tensor:  # (b, L) -> (b,) int64
    """A hash of each caption: a random linear form of its tokens, modulo 2^64. Two different captions share a number
    with a probability below 1e-14 (token numbers are below 2^17), and never if they differ in a single token, because
    the factors are odd.

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
