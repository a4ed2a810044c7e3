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

    Runs a table or figure of the paper, or an experiment of ours, and writes a page with the paper's values beside
    ours. Finished runs have a record in RESULTS and are not repeated: stop the command at any time, run it again and it
    continues. Settings are tuned on held-out training data, with the same number of tries for every method.
    With --scale paper it prints the commands for the paper's data and GPUs, and writes a Slurm script.

    --scale: smoke: a minute or two, to see it work; laptop: locked towers, a minute per run; paper: print commands
    --seeds: number of seeds; 0: as many as the experiment plans
    --parallel: number of runs at a time, each with one thread
    --data: paths of data sets, such as photos=FOLDER; own=FOLDER: your captioned images in FOLDER/train and FOLDER/test
    --cases: run only cases that contain these words, such as 'photos, batch 32'
    --results: folder of the records (runs.jsonl)
    --runs: folder of the runs while they train
    --pages: folder of the pages
    --retry: run failed runs again
    --keep: keep the folders of finished runs
    --list: print all experiments and their questions
    --pages-only: run nothing; write the pages of all experiments from their records

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
    failure: RunFailed | None = None  # raised after the pages are written: they show the failed runs
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
