"""An experiment with the paper's data, models and GPUs: the commands to run it, and a Slurm script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from neuclip.experiments.definition import OBJECTIVE, SETTING, TRAIN, Experiment, Job, flat

GPUS = 8  # the paper's: one machine with eight H100 (section 5)
SLURM = """#!/bin/bash
# One run per array task, on one machine with {gpus} GPUs: sbatch --array=0-{last} {name}.slurm
#SBATCH --job-name={name} --nodes=1 --gpus-per-node={gpus} --ntasks=1 --requeue
# DATA is the folder with cc3m, cc12m, dfn-14m, ...; TASKS that of `neuclip data get`
COMMANDS=(
{commands}
)
eval "${{COMMANDS[$SLURM_ARRAY_TASK_ID]}}"
"""


def paper_jobs(experiment: Experiment, seeds: int = 0) -> list[Job]:
    """One job per row of Table 1 that the paper reports, variant and seed."""
    own = experiment.paper_scale
    jobs = []
    for setting in own.get("settings", ()):
        for variant, given in own["variants"].items():
            for seed in range(seeds or own.get("seeds", 1)):
                settings = dict(given or {})
                objective = settings.pop("objective", "neuclip")
                known = {"data": "paper", SETTING: setting, OBJECTIVE: objective, "run.seed": seed}
                jobs.append(Job(setting, variant, seed, TRAIN, flat(settings, known)))
    return jobs


def paper_command(job: Job, runs: str) -> str:
    """A shell command that writes the recipe, trains or resumes the run, and evaluates it on the 38 tasks."""
    settings = dict(job.settings)
    setting, objective = settings.pop(SETTING), settings.pop(OBJECTIVE)
    settings.pop("data")
    recipe, run = f"{runs}/{setting}-{objective}.yaml", f"{runs}/{job.name}"
    flags = [f"--{key} {shlex.quote(value)}" for key, value in settings.items()]
    train = (
        f"torchrun --nproc-per-node {GPUS} -m neuclip train {recipe} --data.train $DATA/{setting} {' '.join(flags)} "
        f"--checkpoint.milestones 5 --run.folder {runs} --run.name {job.name} --resume auto"
    )
    return (
        f"mkdir -p {runs} && neuclip recipe {setting} {objective} > {recipe} && {train} && "
        f"neuclip eval {run} --tasks datacomp --data $TASKS"
    )


def slurm_script(experiment: Experiment, jobs: Sequence[Job], runs: str) -> str:
    commands = "\n".join(f"  {shlex.quote(paper_command(job, runs))}" for job in jobs)
    return SLURM.format(gpus=GPUS, last=len(jobs) - 1, name=experiment.name, commands=commands)
