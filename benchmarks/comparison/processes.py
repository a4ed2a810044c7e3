"""Runs as processes of their own, a few at a time: skipped when done, continued when cut off, one log each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import FrameType

from benchmarks.comparison.plan import PlannedRun
from neuclip.errors import RunInterrupted
from neuclip.formatting import format_duration

LOOK_EVERY_SECONDS = 0.5


@dataclass
class Started:
    run: PlannedRun
    process: subprocess.Popen[bytes]
    since: float


def log_path(run: PlannedRun, root: Path) -> Path:
    return root / "logs" / f"{run.name}.log"


def start(run: PlannedRun, root: Path) -> Started:
    """The trainer saves when it is stopped: a stopped run loses nothing, a killed one half a minute."""
    folder, log = run.folder(root), log_path(run, root)
    if folder.path.exists() and not any(folder.checkpoints.glob("*.pt")):
        shutil.rmtree(folder.path)  # killed before its first checkpoint: there is nothing to continue
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "neuclip", *run.arguments(root)]
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    return Started(run, process, time.monotonic())


class Timing:
    """How long what is left will take: by the runs of the same setting that were seen, else by the plan's guess."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}

    def note(self, run: PlannedRun, seconds: float) -> None:
        self.seen.setdefault(run.setting.name, []).append(seconds)

    def left(self, runs: Sequence[PlannedRun], parallel: int) -> float:
        return sum(mean(self.seen.get(run.setting.name) or [run.setting.seconds]) for run in runs) / parallel


class StopAll:
    """SIGINT and SIGTERM are handed to the trainers, which save; nothing new is started."""

    def __init__(self, running: list[Started]):
        self.running = running
        self.signal: int | None = None

    def __enter__(self) -> StopAll:
        self.previous = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for started in self.running:
            started.process.terminate()


def execute(runs: Sequence[PlannedRun], root: Path, parallel: int) -> list[PlannedRun]:
    """Run what is not yet done. Answers those that failed; the others go on without them."""
    waiting = [run for run in runs if not run.is_done(root)]
    running: list[Started] = []
    failed: list[PlannedRun] = []
    timing = Timing()
    if len(waiting) < len(runs):
        print(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already", flush=True)
    with StopAll(running) as stop:
        while running or (waiting and stop.signal is None):
            while waiting and len(running) < parallel and stop.signal is None:
                running.append(start(waiting.pop(0), root))
            time.sleep(LOOK_EVERY_SECONDS)
            for ended in [started for started in running if started.process.poll() is not None]:
                running.remove(ended)
                seconds = time.monotonic() - ended.since
                if ended.process.returncode == 0 and ended.run.is_done(root):
                    timing.note(ended.run, seconds)
                elif stop.signal is None:
                    failed.append(ended.run)
                still = [*waiting, *(started.run for started in running)]
                print(
                    progress_line(ended, root, seconds, len(runs) - len(still), len(runs))
                    + f"; about {format_duration(timing.left(still, parallel))} left",
                    flush=True,
                )
    if stop.signal is not None:
        raise RunInterrupted("stopped and saved; the same command goes on from here", 128 + stop.signal)
    return failed


def progress_line(ended: Started, root: Path, seconds: float, done: int, total: int) -> str:
    code = ended.process.returncode
    outcome = "done" if code == 0 else f"ended with {code}, see {log_path(ended.run, root)}"
    return f"{done} of {total}  {ended.run.name}  {outcome} in {format_duration(seconds)}"
