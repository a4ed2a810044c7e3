"""The training loop. Read it beside Algorithm 1 of the paper: lines 3 to 10 of it are one call, the objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import Tensor

from neuclip.data.loader import Batch
from neuclip.distributed.collectives import any_rank, is_main
from neuclip.distributed.error_sync import raise_on_main
from neuclip.distributed.stopping import StopRequest, stop_requests
from neuclip.errors import RunFailed
from neuclip.training.accumulation import Accumulation
from neuclip.training.batches import BatchReader, caption_ids
from neuclip.training.observer import Observer
from neuclip.training.optimizer import NotFinite
from neuclip.training.run import Run
from neuclip.training.schedule import Interval


def train(run: Run, *, evaluate: Callable[[Run], object], save: Callable[[Run], object]) -> None:
    """Train to the end of the budget, from the step the run has reached. `evaluate` and `save` write to its folder.

    Collective: every rank runs this loop on its rows of each batch, and all leave it after the same step.
    """
    observer, first_step = Observer(run), run.step
    towers, objective = run.built.towers.train(), run.objective.train()
    accumulation = Accumulation(towers, micro_batch_size=run.plan.micro_batch, precision=run.precision)
    checkpoint, batch_size = run.settings.checkpoint, run.plan.batch_size
    evaluation_interval = Interval(batch_size, every_samples=run.settings.evaluation.every)
    # Clocks differ: the main rank looks at its own, and the others follow.
    minutes = checkpoint.every_minutes if is_main() else 0.0
    save_interval = Interval(batch_size, every_samples=checkpoint.every_samples, every_minutes=minutes)
    with stop_requests() as stop:
        save_once = SaveOnce(run, save, stop)
        if run.settings.evaluation.at_start and run.step == 0:
            evaluate(run)
            towers.train()
        for batch in observer.time_batches(BatchReader(run, stop, save_once)):
            images, tokens, ids = (x.to(run.device, non_blocking=True) for x in batch[:3])
            texts = tokens if batch.text_features is None else batch.text_features.to(run.device, non_blocking=True)
            with observer.phase("towers"):
                image, text, scale, bias = accumulation.features(images, texts)
            if run.step == first_step:
                refuse_diverged(run, image, text, batch)
            with observer.phase("normalizer"):
                loss = objective(image, text, scale, bias, sample_ids=ids, caption_ids=caption_ids(tokens))
            with observer.phase("towers"):
                gradient_norm = optimizer_step(run, loss, accumulation, batch)
            run.step += 1
            observer.record(loss, gradient_norm)
            if evaluation_interval.passed(run.samples) and run.step < run.plan.steps:
                save_once()  # whatever ends the evaluation, a signal or data that are gone, costs no step
                evaluate(run)
                towers.train()
                observer.restart_clock()
            due = save_interval.passed(run.samples) or run.step in run.plan.milestones
            if any_rank(stop.requested or due):
                if stop.on_any_rank():
                    break
                save_once()
                observer.restart_clock()
        observer.close()
        save_once()
        if stop.on_any_rank():
            raise KeyboardInterrupt


class SaveOnce:
    """Saves the step that the run has reached, unless it is saved already; tells who stops the run what was saved."""

    def __init__(self, run: Run, save: Callable[[Run], object], stop: StopRequest):
        self.run, self.save, self.stop = run, save, stop
        self._note()  # a run starts from a checkpoint, be it that of step 0

    def __call__(self) -> None:
        """Collective."""
        if self.run.step == self.saved_step:
            return
        with self.stop.shielded():
            self.save(self.run)
        self._note()

    def _note(self) -> None:
        run, self.saved_step = self.run, self.run.step
        self.stop.message = (
            f"stopped and saved at {run.samples:,} of {run.settings.train.samples:,} samples; "
            f"continue with: neuclip train --resume {run.folder.path}"
        )


def refuse_diverged(run: Run, image: Tensor, text: Tensor, batch: Batch) -> None:
    """Collective, at the first step: a checkpoint may have been saved just after the update that broke the weights."""
    if any_rank(not bool(image.isfinite().all() and text.isfinite().all())):
        remedy = f"move the newest file of {run.folder.checkpoints} away to continue from the one before, or "
        raise_not_finite(run, "features of the encoders", batch, remedy if run.step else "")


def optimizer_step(run: Run, loss: Tensor, accumulation: Accumulation, batch: Batch) -> Tensor:
    """The norm of the gradient. Not a number in loss or gradient ends the run before the update."""
    try:
        return run.optimizer.update(loss, run.step, accumulation.backward)
    except NotFinite as error:
        raise_not_finite(run, str(error), batch, cause=error)


def raise_not_finite(run: Run, what: str, batch: Batch, remedy: str = "", cause: Exception | None = None) -> NoReturn:
    """Nothing is saved: the objective's state may contain the numbers that are none, and the weights may be broken."""
    ids = ", ".join(str(i) for i in batch.ids[:8].tolist())
    failure = RunFailed(
        f"not a number at step {run.step} ({what}; sample ids {ids}, ...); stopped before the update; {remedy}"
        "start a new run with a lower --optimizer.learning_rate, or look at those samples"
    )
    raise_on_main(failure, cause=cause)
