"""The training loop. Read it beside Algorithm 1 of the paper: lines 3 to 10 of it are one call, the objective."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from neuclip.data.sample import Batch
from neuclip.errors import RunFailed, Stopped
from neuclip.training.due import Due
from neuclip.training.observer import Observer
from neuclip.training.optimizer import NotFinite
from neuclip.training.precision import autocast
from neuclip.training.run import Run
from neuclip.training.stopping import StopRequest


def train(run: Run, evaluate: Callable[[Run], object]) -> None:
    """Train to the end of the budget, from wherever the run stands. `evaluate` measures and writes it down."""
    observer = Observer(run)
    faults = run.fault_log()
    faults.note_source(run.source)
    towers, objective = run.built.towers, run.objective
    save_due, evaluation_due = Due.for_checkpoints(run), Due(every_samples=run.settings.evaluation.every)
    towers.train()
    with StopRequest() as stop:
        for batch in observer.watched(run.batches()):
            faults.note(batch)
            images, tokens, ids = (x.to(run.device, non_blocking=True) for x in batch[:3])
            with observer.phase("towers"), autocast(run.device, run.precision):
                image, text = towers(images, tokens)
            with observer.phase("normalizer"):
                loss = objective(image, text, towers.logit_scale, sample_ids=ids)
            with observer.phase("towers"):
                gradient_norm = updated(run, loss, batch)
            run.step += 1
            observer.note(loss, gradient_norm)
            if stop.signal is not None:
                stop_here(run, stop, observer)
            if evaluation_due(run) and run.step < run.total_steps:
                evaluate(run)
                towers.train()
                observer.restart_clock()
            if save_due(run):
                run.save()
                observer.restart_clock()
    observer.close()
    run.save()


def updated(run: Run, loss: Tensor, batch: Batch) -> Tensor:
    try:
        return run.optimizer.update(loss, run.step)
    except NotFinite as error:
        ids = ", ".join(str(i) for i in batch.ids[:8].tolist())
        raise RunFailed(
            f"not a number at step {run.step} ({error}; sample ids {ids}, ...); stopped before the update, the last "
            "checkpoint is intact; start a new run with a lower --optimizer.learning_rate, or look at those samples"
        ) from error


def stop_here(run: Run, stop: StopRequest, observer: Observer) -> None:
    run.save()
    observer.close()
    raise Stopped(
        f"stopped and saved at {run.samples:,} of {run.settings.train.samples:,} samples; "
        f"continue with: neuclip train --resume {run.folder.path}",
        stop.exit_code,
    )
