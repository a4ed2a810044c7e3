"""The status line of a training run."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

from neuclip.formatting import format_duration
from neuclip.progress import StatusLine


class TrainingProgress:
    """Shows the latest record, with the time left."""

    def __init__(self, *, total_samples: int, first_sample: int):
        self.total = total_samples
        self.first = first_sample
        self.start = time.monotonic()
        self.status = StatusLine()

    def show(self, record: dict[str, Any]) -> None:
        if self.status.due() or record["samples"] >= self.total:
            parts = training_parts(record, total=self.total, seconds_left=self._seconds_left(record["samples"]))
            # A line that wraps cannot be rewritten in place.
            width = shutil.get_terminal_size().columns - 1 if self.status.live else sys.maxsize
            self.status.show(fit(parts, width))

    def close(self) -> None:
        self.status.close()

    def _seconds_left(self, samples: int) -> float:
        done = samples - self.first
        return (time.monotonic() - self.start) / done * (self.total - samples) if done else 0.0


def training_parts(record: dict[str, Any], *, total: int, seconds_left: float) -> list[str]:
    """Most important first: a narrow terminal shows only the first ones."""
    calibration, accuracy = record.get("calibration"), record.get("accuracy")
    parts = [
        f"{record['samples'] / total:4.0%}",
        f"{format_duration(seconds_left)} left",
        f"loss {record['loss']:.3f}",
        "" if accuracy is None else f"in-batch {accuracy:.0%}",
        f"tau {record['temperature']:.4f}",
        "" if calibration is None else f"calibration {calibration:.2f}",
        f"{record['samples_per_second']:.0f}/s",
        f"data {record['data_share']:.0%} towers {record['towers_share']:.0%} "
        f"normalizer {record['normalizer_share']:.0%}",
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
