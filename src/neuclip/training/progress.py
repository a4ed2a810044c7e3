"""The line a person watches while a run trains."""

from __future__ import annotations

import shutil
import time
from typing import Any

from neuclip.progress import StatusLine, format_duration


class TrainingProgress:
    """Live on a terminal, a plain line now and then elsewhere."""

    def __init__(self, *, total_samples: int, first_sample: int):
        self.total = total_samples
        self.first = first_sample
        self.start = time.monotonic()
        self.status = StatusLine()

    def show(self, record: dict[str, Any]) -> None:
        if self.status.due() or record["samples"] >= self.total:
            text = training_line(record, total=self.total, seconds_left=self._seconds_left(record["samples"]))
            width = shutil.get_terminal_size().columns - 1
            self.status.show(text[:width] if self.status.live else text)

    def say(self, text: str) -> None:
        self.status.say(text)

    def close(self) -> None:
        self.status.close()

    def _seconds_left(self, samples: int) -> float:
        done = samples - self.first
        return (time.monotonic() - self.start) / done * (self.total - samples) if done else 0.0


def training_line(record: dict[str, Any], *, total: int, seconds_left: float) -> str:
    """Most wanted first: a narrow terminal cuts off the end."""
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
    return "  ".join(part for part in parts if part)
