"""Records of a run: on each logging step one line over all ranks, written, shown and copied by the main rank."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from neuclip.data.loader import Batch
from neuclip.distributed.collectives import is_main, sum_over_ranks
from neuclip.records import append_line
from neuclip.training.progress import TrainingProgress
from neuclip.training.run import Run
from neuclip.training.sinks import open_sinks


class Observer:
    """Times each step; on logging steps writes one record and shows it."""

    def __init__(self, run: Run):
        self.run = run
        self.timer = PhaseTimer(run.device)
        self.phase = self.timer.phase
        self.sinks = open_sinks(run.settings.log, run.folder) if is_main() else []
        self.progress = TrainingProgress(total_samples=run.plan.samples, first_sample=run.samples)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Time spent on an evaluation or a checkpoint does not count as training speed."""
        self.last_time, self.last_samples = time.perf_counter(), self.run.samples

    def time_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, with the time that the loop waits for them counted as phase "data"."""
        while True:
            self.timer.synchronize = self._logs_at(self.run.step + 1)
            with self.phase("data"):
                batch = next(batches, None)
            if batch is None:
                return
            self.run.truncated_captions.add(batch.tokens)
            yield batch

    def _logs_at(self, step: int) -> bool:
        return step % self.run.settings.log.every == 0 or step in (1, self.run.plan.steps)

    def record(self, loss: Tensor, gradient_norm: Tensor) -> None:
        """Collective on logging steps; does nothing on the others."""
        if not self._logs_at(self.run.step):
            return
        local = {
            "loss": loss.item(),
            **self.run.objective.metrics,
            "truncated_captions": self.run.truncated_captions.share,
        }
        metrics = mean_over_ranks(local, self.run.device)
        if not is_main():
            return
        line = self._line(metrics, gradient_norm.item())
        append_line(self.run.folder.records, line)
        for sink in self.sinks:
            sink.write(line)
        self.progress.show(line)

    def _line(self, metrics: dict[str, float | None], gradient_norm: float) -> dict[str, Any]:
        run, now = self.run, time.perf_counter()
        rate = (run.samples - self.last_samples) / (now - self.last_time)
        self.restart_clock()
        return {
            "samples": run.samples,
            "step": run.step,
            "epoch": run.samples / run.epoch_samples,
            "loss": metrics.pop("loss"),
            "temperature": run.temperature,
            "learning_rate": run.optimizer.learning_rate(run.step - 1),
            "gradient_norm": gradient_norm,
            "samples_per_second": rate,
            **self.timer.shares(),
            **metrics,
        }

    def close(self) -> None:
        self.progress.close()
        for sink in self.sinks:
            sink.close()


class PhaseTimer:
    """Seconds per phase (data, towers, normalizer) since the last reading. A GPU runs behind the program and must be
    waited for at each border; that costs time, and `synchronize` says in which steps. A CPU is always timed."""

    def __init__(self, device: torch.device):
        self.device = device
        self.synchronize = True
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not (self.synchronize or self.device.type == "cpu"):
            yield
            return
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    def shares(self) -> dict[str, float]:
        """Share of each phase in the time since the last call: `data_share`, `towers_share`, `normalizer_share`."""
        total = sum(self.seconds.values()) or 1.0
        shares = {f"{name}_share": self.seconds[name] / total for name in ("data", "towers", "normalizer")}
        self.seconds.clear()
        return shares

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()


def mean_over_ranks(values: dict[str, float | None], device: torch.device) -> dict[str, float | None]:
    """Collective. The mean over the ranks that have a value; None where no rank has one."""
    host = torch.device("cpu") if device.type == "mps" else device  # mps has no float64
    known = [value is not None and not math.isnan(value) for value in values.values()]
    numbers = [value if here else 0.0 for value, here in zip(values.values(), known, strict=True)]
    sums, counts = sum_over_ranks(torch.tensor([numbers, known], dtype=torch.float64, device=host)).tolist()
    return {name: total / count if count else None for name, total, count in zip(values, sums, counts, strict=True)}
