"""Runs the jobs of an experiment, several at a time, each in its own process with one thread. The processes are forks
of one that has imported everything: starting Python anew would take a third of a short run's time.

A kill at any moment loses nothing: a job without a record is started again, and `train --resume auto` continues from
its last checkpoint. A run's folder is removed once its record is written.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from neuclip import api, files
from neuclip.errors import RunFailed, UserError
from neuclip.experiments.definition import REFERENCE, TRAIN, Flat, Job, base_recipe, common, flat
from neuclip.experiments.records import Records, main_figure, record_failed, record_finished
from neuclip.formatting import format_duration, percent
from neuclip.progress import StatusLine
from neuclip.records import RunFolder, write_lines
from neuclip.settings.reading import read_settings
from neuclip.settings.values import parse_whole

START_SECONDS = 2.0  # of a job
SAMPLE_SECONDS = {"locked": 3e-4, "tiny": 4e-3}  # first guess on one core, until a run of the case has finished
WATCH_SECONDS = 1.0  # between updates of the live line
PRELOADED = ["neuclip.experiments.runner", "open_clip", "timm", "transformers"]


class Running(NamedTuple):
    """A job and its process."""

    job: Job
    process: BaseProcess
    started: float


def known_data(data: Sequence[str]) -> dict[str, str]:
    """Read `NAME=PATH`: the paths of data sets, by name."""
    sets, paths = [*filter(needs_path, common()["data"])], {}
    for given in data:
        name, equals, path = given.partition("=")
        if not equals or name not in sets:
            raise UserError(f"--data {given}: give NAME=PATH with a NAME of {', '.join(sets)}")
        for part in (path, f"{path}/train", f"{path}/test"):
            if not Path(part).is_dir():
                raise UserError(f"--data {given}: there is no folder {part}; give one with folders train and test")
        paths[name] = str(Path(path).resolve())
    return paths


def needs_path(data_set: str) -> bool:
    return "{path}" in json.dumps(common()["data"][data_set])


def lacks_data(job: Job, data: Mapping[str, str]) -> str:
    """The name of the job's data set if its path is needed and was not given, else ''."""
    name = job.settings["data"]
    return name if name not in data and needs_path(name) else ""


def resolved(job: Job, runs: Path, data: Mapping[str, str]) -> Flat:
    """The job's settings with the paths of its data, recipe and reference. The job's own settings win."""
    settings = dict(job.settings)
    if key := settings.get(REFERENCE):
        settings[REFERENCE] = str(next((path for path in runs.glob(f"*-{key}") if is_trained(path)), ""))
        if not settings[REFERENCE]:
            raise RunFailed(f"its reference, run {key}, has not finished; --retry tries both again")
    name = settings.pop("data")
    settings["recipe"] = str(base_recipe(settings["recipe"]))
    of_set = {
        key: value.replace("{path}", data.get(name, "PATH")) for key, value in flat(common()["data"][name]).items()
    }
    return of_set | settings


def is_trained(folder: Path) -> bool:
    return RunFolder(folder).summary.is_file()


def perform_job(job: Job, runs: Path, data: Mapping[str, str]) -> None:
    """Train the job's run in the folder of its name, or write the figures of another kind of job there."""
    settings, folder = resolved(job, runs, data), RunFolder(runs / job.name)
    if job.kind != TRAIN:
        write_lines(folder.evaluation, import_module(f"neuclip.experiments.{job.kind}").run(settings))
        return
    recipe = Path(settings.pop("recipe"))
    place = {"run.folder": str(runs), "run.name": job.name}
    api.train(read_settings(recipe, [f"--{key}={value}" for key, value in (settings | place).items()]), resume="auto")


def waiting_jobs(jobs: Sequence[Job], records: Records, *, retry: bool = False) -> list[Job]:
    """The jobs without a record, each once; with `retry` also those that failed."""
    done = {key for key, record in records.items() if record["finished"] or not retry}
    return list({job.key: job for job in jobs if job.key not in done}.values())


def expected_seconds(jobs: Sequence[Job], records: Records, parallel: int) -> float:
    """Estimate the time of the jobs from the time per sample of finished runs of the same case."""
    took: dict[str, list[float]] = {}
    for record in (record for record in records.values() if record["finished"]):
        took.setdefault(record["case"], []).append(record["wall_seconds"] / samples_of(record["settings"]))

    def per_sample(job: Job) -> float:
        known = took.get(job.case)
        return median(known) if known else SAMPLE_SECONDS.get(job.settings.get("recipe", ""), 0.0)

    return sum(START_SECONDS + per_sample(job) * samples_of(job.settings) for job in jobs) / parallel


def samples_of(settings: Mapping[str, str]) -> int:
    return parse_whole(settings.get("train.samples", "1"))


def run_jobs(
    jobs: Sequence[Job], results: Path, runs: Path, *, parallel: int, data: Mapping[str, str], keep: bool
) -> int:
    """Run the jobs and return how many failed. A failure is recorded with its reason; the others go on."""
    waiting, running, failed, began = list(jobs), list[Running](), 0, time.monotonic()
    runs.mkdir(parents=True, exist_ok=True)
    with files.lock(results / "lock", wait=False) as alone, sigterm_exits(), closing(StatusLine()) as status:
        if not alone:
            raise UserError(f"another experiment writes to {results}; wait for it, or give another --results")
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    running.append(start(waiting.pop(0), runs, data))
                while not connection.wait([one.process.sentinel for one in running], timeout=WATCH_SECONDS):
                    if status.live:
                        status.show(progress_of(running, runs))
                for one in [one for one in running if not one.process.is_alive()]:
                    running.remove(one)
                    outcome = why_failed(one, runs)
                    seconds = time.monotonic() - one.started
                    if outcome:
                        failed += 1
                        record_failed(results, one.job, outcome)
                    else:
                        outcome = finish(one.job, results, runs, seconds, keep=keep)
                    number = len(jobs) - len(waiting) - len(running)
                    left = (time.monotonic() - began) / number * (len(jobs) - number)
                    what = f"{one.job.case}, {one.job.variant}, seed {one.job.seed}: {outcome}"
                    took, remaining = format_duration(seconds), format_duration(left)
                    status.say(f"{number} of {len(jobs)}  {what}, {took}  {remaining} left")
        except BaseException:
            for one in running:
                one.process.terminate()  # a run that gets SIGTERM saves a checkpoint first
            for one in running:
                one.process.join()
            status.say("stopped; the same command continues where the runs were saved")
            raise
    return failed


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit, so that child processes are stopped, too, as after Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def start(job: Job, runs: Path, data: Mapping[str, str]) -> Running:
    forks = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
    if forks:
        multiprocessing.set_forkserver_preload(PRELOADED)
    process = multiprocessing.get_context("forkserver" if forks else "spawn").Process  # type: ignore[attr-defined]
    arguments = (job, runs.resolve(), data, dict(os.environ))
    child = process(target=in_child, args=arguments)
    child.start()
    return Running(job, child, time.monotonic())


def why_failed(one: Running, runs: Path) -> str:
    """The last line of a failed job's output, or '' if the job succeeded."""
    one.process.join()
    if one.process.exitcode == 0:
        return ""
    return f"failed: {last_line(log_of(one.job, runs)) or f'ended with code {one.process.exitcode}'}"


def progress_of(running: Sequence[Running], runs: Path) -> str:
    """One terminal line with the progress of every running job."""
    width = shutil.get_terminal_size().columns // len(running) - len(" | ")
    doing = (f"{one.job.variant}, seed {one.job.seed}: {last_line(log_of(one.job, runs))}" for one in running)
    return " | ".join(text[:width] for text in doing)


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].strip() if lines else ""


def log_of(job: Job, runs: Path) -> Path:
    return runs / f"{job.name}.log"


def in_child(job: Job, runs: Path, data: Mapping[str, str], environment: Mapping[str, str]) -> None:
    os.environ.update(environment)  # the parent's present environment; the fork has that of the fork server's start
    torch.set_num_threads(1)
    log = log_of(job, runs)
    # A child of a killed runner may still be training this run: wait for it.
    with files.lock(log.with_suffix(".lock")), log.open("wb") as output:
        for standard in (1, 2):
            os.dup2(output.fileno(), standard)
        try:
            perform_job(job, runs, data)
        except (UserError, RunFailed) as error:
            sys.exit(f"neuclip: {error}")  # this line goes into the record


def finish(job: Job, results: Path, runs: Path, seconds: float, *, keep: bool) -> str:
    """Write the record of a finished job, remove its folder, and return its main figure as text."""
    record = record_finished(results, job, runs / job.name, seconds)
    if not keep:
        shutil.rmtree(runs / job.name)
        for end in (".log", ".lock"):
            log_of(job, runs).with_suffix(end).unlink(missing_ok=True)
    figure = main_figure(record)
    return "done" if figure is None else percent(figure)
