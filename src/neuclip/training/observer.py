"""Records of the steps: on logging steps one record over all ranks is written, shown and copied."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from neuclip.distributed.collectives import is_main, sum_over_ranks
from neuclip.formatting import format_duration
from neuclip.progress import StatusLine
from neuclip.records import append_line
from neuclip.training.run import Run

PHASES = ("data", "towers", "normalizer")
TOO_LONG = 10_000  # words: more than any context holds


class Observer:
    """Times the phases of each step. On logging steps it writes one record, shows it, and copies it to TensorBoard or
    Weights & Biases, which it closes when the loop ends, also after an error.

    >>> with Observer(run) as observer:                                       # doctest: +SKIP
    ...     with observer.phase("towers"): loss = ...
    ...     observer.record(loss, gradient_norm, tokens)
    """

    def __init__(self, run: Run):
        self.run, self.first_sample, self.start = run, run.samples, time.monotonic()
        self.seconds: dict[str, float] = defaultdict(float)  # of each phase since the last record
        self.is_full = full_caption_test(run.built.tokenize)
        self.restart_clock()

    def __enter__(self) -> Observer:
        self.resources = ExitStack()
        self.status = StatusLine()
        self.resources.callback(self.status.close)
        self.copies = list(open_copies(self.run, self.resources)) if is_main() else []
        return self

    def __exit__(self, *error: object) -> None:
        self.resources.close()

    def restart_clock(self) -> None:
        """Measure the speed from here on, without the time that an evaluation or a checkpoint took."""
        self.last_time, self.last_samples = time.perf_counter(), self.run.samples

    def logs_at(self, step: int) -> bool:
        return step % self.run.settings.log.every == 0 or step in (1, self.run.plan.steps)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, time counts for the phase `name`. A GPU works asynchronously and must be waited for at both ends,
        which costs time: it is timed on logging steps only. A CPU is always timed."""
        device = self.run.device.type
        if device != "cpu" and not self.logs_at(self.run.step + 1):
            yield
            return
        synchronize = getattr(torch, device).synchronize
        synchronize()
        start = time.perf_counter()
        yield
        synchronize()
        self.seconds[name] += time.perf_counter() - start

    def record(self, loss: Tensor, gradient_norm: Tensor, tokens: Tensor) -> None:
        """Write and show the record of a logging step. Collective then; does nothing on other steps."""
        run = self.run
        if not self.logs_at(run.step):
            return
        local = {
            "loss": loss.item(),
            **run.objective.metrics,
            "truncated_captions": self.is_full(tokens).double().mean().item(),
        }
        metrics = mean_over_ranks(local, run.device)
        if not is_main():
            return
        line = self._line(metrics, gradient_norm.item())
        append_line(run.folder.records, line)
        for copy in self.copies:
            copy({f"train/{key}": x for key, x in line.items() if isinstance(x, int | float)}, run.samples)
        if self.status.due() or run.step == run.plan.steps:
            # A line that wraps cannot be rewritten in place.
            width = shutil.get_terminal_size().columns - 1 if self.status.live else sys.maxsize
            self.status.show(fit(self._parts(line), width))

    def _line(self, metrics: dict[str, float | None], gradient_norm: float) -> dict[str, Any]:
        run, total = self.run, sum(self.seconds.values()) or 1.0
        line = {
            "samples": run.samples,
            "step": run.step,
            "epoch": run.samples / run.epoch_samples,
            "loss": metrics.pop("loss"),
            "temperature": run.temperature,
            "learning_rate": run.optimizer.learning_rate(run.step - 1),
            "gradient_norm": gradient_norm,
            "samples_per_second": (run.samples - self.last_samples) / (time.perf_counter() - self.last_time),
            **{f"{name}_share": self.seconds[name] / total for name in PHASES},
            **metrics,
        }
        self.seconds.clear()
        self.restart_clock()
        return line

    def _parts(self, line: dict[str, Any]) -> list[str]:
        """The parts of the status line, most important first: a narrow terminal shows only the first ones."""
        run, calibration, accuracy = self.run, line.get("calibration"), line.get("accuracy")
        seconds_per_sample = (time.monotonic() - self.start) / (run.samples - self.first_sample)
        parts = [
            f"{run.samples / run.plan.samples:4.0%}",
            f"{format_duration(seconds_per_sample * (run.plan.samples - run.samples))} left",
            f"loss {line['loss']:.3f}",
            "" if accuracy is None else f"in-batch {accuracy:.0%}",
            f"tau {line['temperature']:.4f}",
            "" if calibration is None else f"calibration {calibration:.2f}",
            f"{line['samples_per_second']:.0f}/s",
            " ".join(f"{name} {line[f'{name}_share']:.0%}" for name in PHASES),
        ]
        return [part for part in parts if part]


def fit(parts: list[str], width: int) -> str:
    """As many whole parts as fit into `width`.

    >>> fit(["50%", "3 s left", "loss 0.12"], 14)
    '50%  3 s left'
    """
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts = parts[:-1]
    return "  ".join(parts)


def open_copies(run: Run, resources: ExitStack) -> Iterator[Callable[[dict[str, float], int], Any]]:
    """Functions that copy a record to TensorBoard and Weights & Biases, as the settings say; `resources` closes them.
    `build_run` has checked that their packages are installed."""
    if run.settings.log.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(run.folder.path / "tensorboard")  # type: ignore[no-untyped-call]
        resources.callback(writer.close)

        def write(values: dict[str, float], samples: int) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, samples)  # type: ignore[no-untyped-call]

        yield write
    if run.settings.log.wandb:
        import wandb

        # Offline: files in the run's folder, which `wandb sync` can upload.
        session = wandb.init(mode="offline", dir=run.folder.path, project="neuclip", name=run.folder.path.name)
        resources.callback(session.finish)
        yield lambda values, samples: session.log(values, step=samples)


def full_caption_test(tokenize: Callable[[list[str]], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of tokens (b, L) that tells which rows (b,) fill the context, and may be truncated. A caption that
    just fits is among them: its tokens look the same."""
    empty, too_long = tokenize(["", "a " * TOO_LONG])  # (L,), (L,)
    # Not simply the last token: a truncated caption has its end token there, and some tokenizers pad with that token.
    position = int((empty != too_long).nonzero()[-1])
    return lambda tokens: tokens[:, position] != empty[position]


def mean_over_ranks(values: dict[str, float | None], device: torch.device) -> dict[str, float | None]:
    """The mean of each value over the ranks that have it; None where no rank has it. Collective."""
    host = torch.device("cpu") if device.type == "mps" else device  # mps has no float64
    known = [value is not None and not math.isnan(value) for value in values.values()]
    numbers = [value if is_known else 0.0 for value, is_known in zip(values.values(), known, strict=True)]
    sums, counts = sum_over_ranks(torch.tensor([numbers, known], dtype=torch.float64, device=host)).tolist()
    return {name: total / count if count else None for name, total, count in zip(values, sums, counts, strict=True)}
