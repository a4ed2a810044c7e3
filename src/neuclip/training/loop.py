"""The training loop. Read it beside Algorithm 1 of the paper: lines 3 to 10 of it are one call, the objective."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from neuclip.data.sample import Batch
from neuclip.errors import RunFailed, Stopped
from neuclip.records import append_line
from neuclip.training.due import Due
from neuclip.training.optimizer import NotFinite
from neuclip.training.phases import Phases
from neuclip.training.precision import autocast
from neuclip.training.progress import TrainingProgress
from neuclip.training.run import Run
from neuclip.training.sinks import open_sinks
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
            if save_due(run):
                run.save()
    observer.close()
    run.save()


def updated(run: Run, loss: Any, batch: Batch) -> Any:
    try:
        return run.optimizer.update(loss, run.step)
    except NotFinite as error:
        good = "resume from the last checkpoint with a lower --optimizer.learning_rate in a new run"
        ids = ", ".join(str(i) for i in batch.ids[:8].tolist())
        raise RunFailed(
            f"not a number at step {run.step} ({error}; sample ids {ids}, ...); stopped before the update; {good}"
        ) from error


def stop_here(run: Run, stop: StopRequest, observer: Observer) -> None:
    run.save()
    observer.close()
    raise Stopped(
        f"stopped and saved at {run.samples:,} of {run.settings.train.samples:,} samples; "
        f"continue with: neuclip train --resume {run.folder.path}",
        stop.exit_code,
    )


class Observer:
    """Sees each step, and on logging steps writes one record and shows it."""

    def __init__(self, run: Run):
        self.run = run
        self.phases = Phases(run.device)
        self.phase = self.phases.phase
        self.sinks = open_sinks(run.settings.log, run.folder)
        self.progress = TrainingProgress(
            total_samples=run.total_steps * run.settings.train.batch_size, first_sample=run.samples
        )
        self.last_time, self.last_samples = time.perf_counter(), run.samples

    def watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, with the time that the loop waits for them on the clock."""
        while True:
            self.phases.watching = self._logs_at(self.run.step + 1)
            with self.phase("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _logs_at(self, step: int) -> bool:
        return step % self.run.settings.log.every == 0 or step in (1, self.run.total_steps)

    def note(self, loss: Any, gradient_norm: Any) -> None:
        if not self._logs_at(self.run.step):
            return
        record = self._record(loss.item(), gradient_norm.item())
        append_line(self.run.folder.records, record)
        for sink in self.sinks:
            sink.write(record)
        self.progress.show(record)

    def _record(self, loss: float, gradient_norm: float) -> dict[str, Any]:
        run, now = self.run, time.perf_counter()
        rate = (run.samples - self.last_samples) / (now - self.last_time)
        self.last_time, self.last_samples = now, run.samples
        return {
            "samples": run.samples,
            "step": run.step,
            "epoch": run.samples / len(run.source),
            "loss": loss,
            "temperature": run.temperature,
            "learning_rate": run.optimizer.learning_rate(run.step - 1),
            "gradient_norm": gradient_norm,
            "samples_per_second": rate,
            **self.phases.shares(),
            **run.objective.metrics,
        }

    def close(self) -> None:
        self.progress.close()
        for sink in self.sinks:
            sink.close()
