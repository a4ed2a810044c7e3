"""The training loop. Read it beside Algorithm 1 of the paper: lines 3 to 10 of it are one call, the objective."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from neuclip.data.sample import Batch
from neuclip.distributed.collectives import any_rank, is_main
from neuclip.distributed.error_sync import raise_on_main
from neuclip.errors import RunFailed, RunInterrupted
from neuclip.training.accumulation import Accumulation
from neuclip.training.batches import read_batches
from neuclip.training.captions import caption_ids
from neuclip.training.observer import Observer
from neuclip.training.optimizer import NotFinite
from neuclip.training.run import Run
from neuclip.training.schedule import Interval
from neuclip.training.stopping import StopRequest


def train(run: Run, *, evaluate: Callable[[Run], object], save: Callable[[Run], object]) -> None:
    """Train to the end of the budget, from the step the run has reached. `evaluate` and `save` write to its folder.

    Collective: every rank runs this loop on its rows of each batch, and all leave it after the same step.
    """
    observer = Observer(run)
    towers, objective = run.built.towers.train(), run.objective.train()
    accumulation = Accumulation(towers, micro_batch_size=run.plan.micro_batch, precision=run.precision)
    checkpoint, batch_size = run.settings.checkpoint, run.plan.batch_size
    evaluation_interval = Interval(batch_size, every_samples=run.settings.evaluation.every)
    # Clocks differ: the main rank looks at its own, and the others follow.
    minutes = checkpoint.every_minutes if is_main() else 0.0
    save_interval = Interval(batch_size, every_samples=checkpoint.every_samples, every_minutes=minutes)
    with StopRequest() as stop:
        for batch in observer.time_batches(read_batches(run, stop)):
            images, tokens, ids = (x.to(run.device, non_blocking=True) for x in batch[:3])
            with observer.phase("towers"):
                image, text, scale, bias = accumulation.features(images, tokens)
            objective.learning_rate_factor = run.optimizer.rate_factor(run.step)
            with observer.phase("normalizer"):
                loss = objective(image, text, scale, bias, sample_ids=ids, caption_ids=caption_ids(tokens))
            with observer.phase("towers"):
                gradient_norm = optimizer_step(run, loss, accumulation, batch)
            run.step += 1
            observer.record(loss, gradient_norm)
            if evaluation_interval.passed(run.samples) and run.step < run.plan.steps:
                evaluate(run)
                towers.train()
                observer.restart_clock()
            if any_rank(stop.requested or save_interval.passed(run.samples)):
                if stop.on_any_rank():
                    break
                save(run)
                observer.restart_clock()
    observer.close()
    save(run)
    if stop.on_any_rank():
        raise_on_main(
            RunInterrupted(
                f"stopped and saved at {run.samples:,} of {run.settings.train.samples:,} samples; "
                f"continue with: neuclip train --resume {run.folder.path}",
                stop.exit_code,
            )
        )


def optimizer_step(run: Run, loss: Tensor, accumulation: Accumulation, batch: Batch) -> Tensor:
    """The norm of the gradient. Not a number in loss or gradient ends the run before the update."""
    try:
        return run.optimizer.update(loss, run.step, accumulation.backward)
    except NotFinite as error:
        ids = ", ".join(str(i) for i in batch.ids[:8].tolist())
        failure = RunFailed(
            f"not a number at step {run.step} ({error}; sample ids {ids}, ...); stopped before the update, the last "
            "checkpoint is intact; start a new run with a lower --optimizer.learning_rate, or look at those samples"
        )
        raise_on_main(failure, cause=error)
