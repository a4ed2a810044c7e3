"""`neuclip experiment`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from neuclip.cli.command import Count
from neuclip.errors import RunFailed, UserError, require
from neuclip.report.page import write_page

Scale = Literal["smoke", "laptop", "paper"]
Seeds = Annotated[int, {"at_least": 0}]


def experiment(
    name: str = "",
    *,
    scale: Scale = "laptop",
    seeds: Seeds = 0,
    parallel: Count = 1,
    data: tuple[str, ...] = (),
    cases: str = "",
    results: str = "results",
    runs: str = "runs/experiments",
    pages: str = "experiments",
    keep: bool = False,
    retry: bool = False,
    list_: bool = False,
    pages_only: bool = False,
) -> int:
    """neuclip experiment NAME [--scale smoke|laptop|paper] [--seeds K] [--parallel N] [--data NAME=PATH,...]

    Runs one of the paper's tables or figures, or one of ours, and writes a page with the paper's values beside them.
    Runs that have a record in RESULTS are not repeated, so it can be stopped and continued at any time; settings are
    tuned on held-out training data, with as many tries for every method.
    At scale paper it prints the commands for the paper's data and GPUs instead, and a Slurm script.

    --scale: smoke: a minute or two, to see it work; laptop: locked towers, a minute per run; paper: prints commands
    --seeds: number of seeds; 0: the experiment's own
    --parallel: runs at a time, each with one thread
    --data: where data sets are that need a path, such as photos=FOLDER; own=FOLDER is any captioned images
    --cases: only cases that contain these words, such as 'photos, batch 32'
    --results: folder of the records (runs.jsonl)
    --runs: folder of the runs while they train
    --pages: folder of the pages
    --retry: also run again what failed before
    --keep: keep the runs' folders after their records are written
    --list: print all experiments with their questions
    --pages-only: run nothing, write the pages of all records

    neuclip experiment --list
    neuclip experiment restarts --scale smoke
    neuclip experiment comparison --data photos=PHOTOS/fashion --parallel 2
    """
    from neuclip.experiments import definition

    if list_ or not (name or pages_only):
        for one in map(definition.read_experiment, definition.experiments()):
            print(f"{one.name:<24}{one.question}")
        return 0
    require("experiment", "jinja2", "open_clip", extra="train")  # before anything is run
    from neuclip.experiments import paper_scale
    from neuclip.experiments.perform import PAPER, Request, collect, perform, write_pages
    from neuclip.experiments.runner import known_data

    chosen = [definition.read_experiment(one) for one in ([name] if name else definition.experiments())]
    request = Request(scale, seeds, cases, known_data(data), Path(results))
    failure: RunFailed | None = None  # told after the pages are written, which show it
    for one in chosen if not pages_only else ():
        if scale == PAPER:
            jobs = request.jobs(one)
            if not jobs:
                raise UserError(f"{one.name} has no runs at the paper's scale; give --scale laptop")
            collect(one, request, Path(runs))
            print(*(paper_scale.paper_command(job, runs) for job in jobs), sep="\n")
            print(write_page(Path(pages) / f"{one.name}.slurm", paper_scale.slurm_script(one, jobs, runs)))
        else:
            try:
                perform(one, request, Path(runs), parallel=parallel, keep=keep, retry=retry)
            except RunFailed as error:
                failure = error
    print(*write_pages(chosen, request, Path(pages)), sep="\n")
    if failure:
        raise failure
    return 0
