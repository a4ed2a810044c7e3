"""From the name of an experiment to its page: tune, run what has no record yet, write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from neuclip.experiments import definition
from neuclip.experiments.definition import TRAIN, Experiment, Job
from neuclip.experiments.page import (
    experiment_page,
    figures_text,
    finished_cases,
    index_page,
    plain_sections,
    tuning_tables,
)
from neuclip.experiments.paper_scale import paper_jobs
from neuclip.experiments.records import best_tries, read_records
from neuclip.experiments.runner import expected_seconds, finish, lacks_data, run_jobs, unfinished
from neuclip.formatting import format_duration, plural
from neuclip.progress import say
from neuclip.records import RunFolder
from neuclip.report.page import render_html, write_page

ENDS = (".md", ".csv", ".tex")


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    scale: str
    seeds: int = 0
    cases: str = ""  # only cases that contain this
    results: Path = Path("results")

    def tuning(self, experiment: Experiment) -> list[Job]:
        tried = definition.tuning_plan(experiment, self.scale)
        return self.chosen([job for candidates in tried.values() for _, job in candidates])

    def jobs(self, experiment: Experiment) -> list[Job]:
        """Where the experiment is tuned, of the cases whose tries have finished."""
        if self.scale == "paper":
            return self.chosen(paper_jobs(experiment, self.seeds))
        tried = definition.tuning_plan(experiment, self.scale)
        best = best_tries(tried, read_records(self.results), experiment.measure)
        return self.chosen(definition.plan(experiment, self.scale, self.seeds, best))

    def chosen(self, jobs: Sequence[Job]) -> list[Job]:
        return [job for job in jobs if self.cases in job.case]


def perform(
    experiment: Experiment, plan: Plan, runs: Path, *, parallel: int, data: Mapping[str, str], keep: bool
) -> None:
    """Tune, then train. Both say first what they will cost."""
    for what, jobs in (("tuning", plan.tuning), ("the experiment", plan.jobs)):
        planned, records = jobs(experiment), read_records(plan.results)
        here = [job for job in planned if not lacks_data(job, data)]
        if missing := sorted({job.settings["data"] for job in planned} - {job.settings["data"] for job in here}):
            say(f"left out: cases on {', '.join(missing)}; give --data {missing[0]}=PATH")
        waiting = unfinished(here, records)
        seconds = format_duration(expected_seconds(waiting, records, parallel))
        say(f"{what}: {plural(len(here), 'run')}, {len(here) - len(waiting)} finished; about {seconds}")
        if waiting:
            run_jobs(waiting, plan.results, runs, parallel=parallel, data=data, keep=keep)


def collect(experiment: Experiment, plan: Plan, runs: Path) -> None:
    """Records of the runs of the paper's scale that have come back. Their folders stay."""
    for job in unfinished(plan.jobs(experiment), read_records(plan.results)):
        if RunFolder(runs / job.name).summary.is_file():
            finish(job, plan.results, runs, 0.0, keep=True)


def write_pages(experiments: Sequence[Experiment], plan: Plan, folder: Path) -> list[Path]:
    """The page and the tables of each experiment, and an index. The same bytes from the same records."""
    records = read_records(plan.results)
    written, rows = [], []
    for experiment in experiments:
        jobs = plan.jobs(experiment)
        tried = definition.tuning_plan(experiment, plan.scale)
        tables = tuning_tables(tried, records, experiment.measure) if plan.scale != "paper" else {}
        counted = [*jobs, *(job for candidates in tried.values() for _, job in candidates)]
        seconds = sum({job.key: records.get(job.key, {}).get("wall_seconds", 0.0) for job in counted}.values())
        cases = finished_cases(experiment, jobs, records) if experiment.kind == TRAIN else []
        extra = [] if experiment.kind == TRAIN else plain_sections(jobs, records)
        command = f"neuclip experiment {experiment.name}" + (f" --scale {plan.scale}" if plan.scale != "laptop" else "")
        page = experiment_page(experiment, cases, extra, tables, [command], seconds)
        written.append(write_page(folder / f"{experiment.name}.html", render_html(page)))
        for end in ENDS if cases else ():
            written.append(write_page(folder / f"{experiment.name}{end}", figures_text(cases, end)))
        rows.append((experiment, cases, seconds))
    written.append(write_page(folder / "index.html", render_html(index_page(rows))))
    return written
