"""Who watches a run: one record per logging step, of all processes, written, shown, and handed to the sinks by one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from neuclip.data.sample import Batch
from neuclip.distributed.collectives import is_main, sum_over_ranks
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
        self.sinks = open_sinks(run.settings.log, run.folder) if is_main() else []
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
            self.run.truncated_captions.note(batch.tokens)
            yield batch

    def _logs_at(self, step: int) -> bool:
        return step % self.run.settings.log.every == 0 or step in (1, self.run.total_steps)

    def note(self, loss: Tensor, gradient_norm: Tensor) -> None:
        """Collective on logging steps."""
        if not self._logs_at(self.run.step):
            return
        own = {
            "loss": loss.item(),
            **self.run.objective.metrics,
            "truncated_captions": self.run.truncated_captions.share,
        }
        measured = mean_over_ranks(own, self.run.device)
        if is_main():
            self._write(self._record(measured, gradient_norm.item()))

    def _write(self, record: dict[str, Any]) -> None:
        append_line(self.run.folder.records, record)
        for sink in self.sinks:
            sink.write(record)
        self.progress.show(record)

    def _record(self, measured: dict[str, float | None], gradient_norm: float) -> dict[str, Any]:
        run, now = self.run, time.perf_counter()
        rate = (run.samples - self.last_samples) / (now - self.last_time)
        self.restart_clock()
        return {
            "samples": run.samples,
            "step": run.step,
            "epoch": run.samples / run.epoch_samples,
            "loss": measured.pop("loss"),
            "temperature": run.temperature,
            "learning_rate": run.optimizer.learning_rate(run.step - 1),
            "gradient_norm": gradient_norm,
            "samples_per_second": rate,
            **self.phases.shares(),
            **measured,
        }

    def close(self) -> None:
        self.progress.close()
        for sink in self.sinks:
            sink.close()


def mean_over_ranks(values: dict[str, float | None], device: torch.device) -> dict[str, float | None]:
    """Collective. What no process has stays None; what some have is the mean over those."""
    host = torch.device("cpu") if device.type == "mps" else device  # which knows no float64
    known = [value is not None and not math.isnan(value) for value in values.values()]
    numbers = [value if here else 0.0 for value, here in zip(values.values(), known, strict=True)]
    sums, counts = sum_over_ranks(torch.tensor([numbers, known], dtype=torch.float64, device=host)).tolist()
    return {name: total / count if count else None for name, total, count in zip(values, sums, counts, strict=True)}
