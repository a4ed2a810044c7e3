"""Performs an experiment: tune, run the jobs without a record, write the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from neuclip.errors import RunFailed, UserError
from neuclip.experiments import definition
from neuclip.experiments.case import finished_cases
from neuclip.experiments.definition import TRAIN, Choice, Experiment, Flat, Job
from neuclip.experiments.page import (
    experiment_page,
    failures,
    figures_text,
    index_page,
    plain_sections,
    tuning_tables,
)
from neuclip.experiments.paper_scale import paper_jobs
from neuclip.experiments.records import Records, best_tries, read_records
from neuclip.experiments.runner import expected_seconds, finish, is_trained, lacks_data, run_jobs, waiting_jobs
from neuclip.formatting import format_duration, plural
from neuclip.progress import say
from neuclip.records import RunFolder
from neuclip.report.page import render_html, write_page

PAPER = "paper"
ENDS = (".md", ".csv", ".tex")


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    scale: str
    seeds: int = 0  # 0: the experiment's own number
    words: str = ""  # only cases that contain these words
    data: Mapping[str, str] = field(default_factory=dict)  # paths of data sets, by name
    results: Path = Path("results")

    def cases(self, experiment: Experiment) -> list[str]:
        every = definition.cases_of(experiment, self.scale, own_data="own" in self.data)
        return [case for case in every if self.words in case]

    def tried(self, experiment: Experiment) -> dict[Choice, list[tuple[Flat, Job]]]:
        if self.scale == PAPER:
            return {}
        return definition.tuning_plan(experiment, self.scale, self.cases(experiment))

    def tuning(self, experiment: Experiment) -> list[Job]:
        return [job for candidates in self.tried(experiment).values() for _, job in candidates]

    def references(self, experiment: Experiment, *, retry: bool) -> list[Job]:
        """The runs that train the reference models for DRRho's waiting runs."""
        every = [*self.tuning(experiment), *self.jobs(experiment)]
        wanted = waiting_jobs(every, read_records(self.results), retry=retry)
        sets = dict.fromkeys(job.settings["data"] for job in wanted if definition.REFERENCE in job.settings)
        return [definition.reference_job(self.scale, data) for data in sets]

    def jobs(self, experiment: Experiment) -> list[Job]:
        """The runs that are reported; in a tuned experiment only those of variants whose tries have all finished."""
        if self.scale == PAPER:
            return [job for job in paper_jobs(experiment, self.seeds) if self.words in job.case]
        best = best_tries(self.tried(experiment), read_records(self.results), experiment.measure)
        return definition.plan(experiment, self.scale, self.cases(experiment), self.seeds, best)


def perform(experiment: Experiment, request: Request, runs: Path, *, parallel: int, keep: bool, retry: bool) -> None:
    """Train reference models, run the tries, then the experiment. Says before each stage how long it will take; raises
    RunFailed at the end if runs failed."""

    def stage(what: str, jobs: Sequence[Job], records: Records, *, keep: bool) -> int:
        here = [job for job in jobs if not lacks_data(job, request.data)]
        waiting = waiting_jobs(here, records, retry=retry)
        if here:
            time = format_duration(expected_seconds(waiting, records, parallel))
            say(f"{what}: {progress_text(here, records, retry=retry)}; about {time}")
        if not waiting:
            return 0
        return run_jobs(waiting, request.results, runs, parallel=parallel, data=request.data, keep=keep)

    check_request(experiment, request)
    # A reference is needed as a model: it is trained again if its folder is gone, even if there is a record.
    references = [job for job in request.references(experiment, retry=retry) if not is_trained(runs / job.name)]
    failed = stage("references", references, {}, keep=True)
    for what, jobs in (("tuning", request.tuning), ("the experiment", request.jobs)):
        failed += stage(what, jobs(experiment), read_records(request.results), keep=keep)
    if failed:
        raise RunFailed(f"{plural(failed, 'run')} failed; the page says why; --retry tries again")


def check_request(experiment: Experiment, request: Request) -> None:
    """Raise UserError if there is nothing to run or to show. Say which runs are left out because data is missing."""
    if not request.cases(experiment):
        known = "; ".join(replace(request, words="").cases(experiment))
        raise UserError(f"no case of {experiment.name} contains {request.words!r}; its cases are: {known}")
    planned, records = [*request.tuning(experiment), *request.jobs(experiment)], read_records(request.results)
    missing = sorted({lacks_data(job, request.data) for job in planned} - {""})
    if all(lacks_data(job, request.data) and job.key not in records for job in planned):
        raise UserError(
            f"{experiment.name} needs the data set {missing[0]}; give --data {missing[0]}=PATH, or --data own=PATH for "
            "captioned images of your own in PATH/train and PATH/test"
        )
    if missing:
        say(f"left out: runs that need {', '.join(missing)}; give --data {missing[0]}=PATH")


def progress_text(jobs: Sequence[Job], records: Records, *, retry: bool) -> str:
    finished = [records[job.key]["finished"] for job in jobs if job.key in records]
    failed = finished.count(False)
    skipped = f", {failed} failed before and not tried again without --retry" if failed and not retry else ""
    return f"{plural(len(jobs), 'run')}, {finished.count(True)} finished{skipped}"


def collect(experiment: Experiment, request: Request, runs: Path) -> None:
    """Write the records of finished runs at the paper's scale. Their folders stay."""
    request.results.mkdir(parents=True, exist_ok=True)
    for job in waiting_jobs(request.jobs(experiment), read_records(request.results), retry=True):
        if RunFolder(runs / job.name).summary.is_file():
            finish(job, request.results, runs, 0.0, keep=True)


def write_pages(experiments: Sequence[Experiment], request: Request, folder: Path) -> list[Path]:
    """Write the page and tables of each experiment, and an index. The same records give the same bytes."""
    records = read_records(request.results)
    written, rows = [], []
    for experiment in experiments:
        jobs, tried = request.jobs(experiment), request.tried(experiment)
        planned = {job.key for job in (*jobs, *request.tuning(experiment))}
        seconds = sum(records[key].get("wall_seconds", 0.0) for key in planned if key in records)
        metric = experiment.measure if request.scale != PAPER else "average"  # of DataComp's 38 tasks
        cases = finished_cases(experiment, jobs, records, metric) if experiment.kind == TRAIN else []
        extra = [] if experiment.kind == TRAIN else plain_sections(jobs, records, experiment.across or "samples seen")
        tables = tuning_tables(tried, records, experiment.measure)
        failed = failures([*request.tuning(experiment), *jobs], records)
        scale = f" --scale {request.scale}" if request.scale != "laptop" else ""
        command = f"neuclip experiment {experiment.name}{scale}"
        page = experiment_page(experiment, cases, extra, failed, tables, [command], seconds)
        written.append(write_page(folder / f"{experiment.name}.html", render_html(page)))
        for end in ENDS if cases else ():
            written.append(write_page(folder / f"{experiment.name}{end}", figures_text(cases, end)))
        rows.append((experiment, cases, seconds))
    return [*written, write_page(folder / "index.html", render_html(index_page(rows)))]
