"""Who watches a run: one record per logging step, written, shown, and handed to the sinks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from neuclip.data.sample import Batch
from neuclip.records import append_line
from neuclip.training.phases import Phases
from neuclip.training.progress import TrainingProgress
from neuclip.training.run import Run
from neuclip.training.sinks import open_sinks


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
        self.restart_clock()

    def restart_clock(self) -> None:
        """What lies between here and the last record, an evaluation or a checkpoint, is not training speed."""
        self.last_time, self.last_samples = time.perf_counter(), self.run.samples

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

    def note(self, loss: Tensor, gradient_norm: Tensor) -> None:
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
        self.restart_clock()
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
