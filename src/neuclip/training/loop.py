"""The training loop. Read it beside Algorithm 1 of the paper: lines 3 to 10 of it are one call, the objective."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from neuclip.data.sample import Batch
from neuclip.distributed.collectives import any_rank
from neuclip.distributed.error_sync import raise_together
from neuclip.errors import RunFailed, RunInterrupted
from neuclip.training.accumulation import Accumulation
from neuclip.training.batches import read_batches
from neuclip.training.caption_ids import caption_ids
from neuclip.training.interval import Interval
from neuclip.training.observer import Observer
from neuclip.training.optimizer import NotFinite
from neuclip.training.run import Run
from neuclip.training.stopping import StopRequest


def train(run: Run, evaluate: Callable[[Run], object]) -> None:
    """Train to the end of the budget, from wherever the run stands. `evaluate` measures and writes it down.

    Collective: every process runs this loop on its rows of each batch, and all leave it after the same step.
    """
    observer = Observer(run)
    towers, objective = run.built.towers.train(), run.objective.train()
    accumulation = Accumulation(towers, micro_batch_size=run.settings.train.micro_batch_size, precision=run.precision)
    save_due, evaluation_due = Interval.for_checkpoints(run), Interval(every_samples=run.settings.evaluation.every)
    with StopRequest() as stop:
        for batch in observer.watched(read_batches(run, stop)):
            images, tokens, ids = (x.to(run.device, non_blocking=True) for x in batch[:3])
            with observer.phase("towers"):
                image, text, scale, bias = accumulation.features(images, tokens)
            with observer.phase("normalizer"):
                loss = objective(image, text, scale, bias, sample_ids=ids, caption_ids=caption_ids(tokens))
            with observer.phase("towers"):
                gradient_norm = updated(run, loss, accumulation, batch)
            run.step += 1
            observer.note(loss, gradient_norm)
            if evaluation_due(run) and run.step < run.total_steps:
                evaluate(run)
                towers.train()
                observer.restart_clock()
            if any_rank(stop.requested or save_due(run)):
                if stop.anywhere():
                    break
                run.save()
                observer.restart_clock()
    observer.close()
    run.save()
    if stop.anywhere():
        stopped(run, stop)


def updated(run: Run, loss: Tensor, accumulation: Accumulation, batch: Batch) -> Tensor:
    try:
        return run.optimizer.update(loss, run.step, accumulation.backward)
    except NotFinite as error:
        ids = ", ".join(str(i) for i in batch.ids[:8].tolist())
        failure = RunFailed(
            f"not a number at step {run.step} ({error}; sample ids {ids}, ...); stopped before the update, the last "
            "checkpoint is intact; start a new run with a lower --optimizer.learning_rate, or look at those samples"
        )
        raise_together(failure, cause=error)


def stopped(run: Run, stop: StopRequest) -> None:
    message = (
        f"stopped and saved at {run.samples:,} of {run.settings.train.samples:,} samples; "
        f"continue with: neuclip train --resume {run.folder.path}"
    )
    raise_together(RunInterrupted(message, stop.exit_code))
