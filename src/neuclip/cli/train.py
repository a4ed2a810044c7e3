"""`neuclip train` and the commands that prepare it: `neuclip doctor`, `neuclip recipe`."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from neuclip.cli.command import Count, find_run, help_page, is_main_rank, print_json, read_page
from neuclip.errors import UserError, proposal
from neuclip.progress import waiting
from neuclip.records import RunFolder
from neuclip.secrets import without_queries
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.paper import paper_lines, paper_objectives, paper_settings, paper_yaml, read_paper
from neuclip.settings.reading import SECTION_NAMES, read_settings
from neuclip.settings.sections import Settings
from neuclip.settings.writing import first_line, help_text, settings_as_dict

AUTO: Literal["auto"] = "auto"  # value of --resume: the run of --run.name
WIDTH = 120  # of doctor's lines if stdout is not a terminal


def train(recipe: str = "", *, resume: str = "", json: bool = False, settings: list[str]) -> int:
    """neuclip train [RECIPE] [--section.field value ...] | neuclip train --resume RUN

    Trains a model and writes a run folder: records, checkpoints, the model in open_clip's format, a report.
    RECIPE is a YAML file or a shipped recipe (finetune, locked, tiny) [default: tiny]. Flags override it.
    To train on several GPUs, or with several ranks on a CPU: torchrun --nproc-per-node N -m neuclip train ...
    For help on one section of the settings only: neuclip train --help optimizer

    --resume: continue this run from its last checkpoint, with its own settings; auto: continue the run of --run.name,
        or start it if it does not exist
    --json: print the run's summary as JSON on stdout when training ends; everything else goes to stderr

    neuclip train --objective clip --train.samples 20k --run.name first
    neuclip train tiny --data.train 'shards/{00000..00019}.tar' --model.name ViT-B-32 --train.batch_size 512
    """
    if resume and resume != AUTO and recipe:
        raise UserError(f"--resume continues a run with its own settings; remove the recipe {recipe!r}")
    run = find_run(resume) if resume and resume != AUTO else None
    chosen = read_settings(run.settings if run else Path(recipe) if recipe else None, settings)
    from neuclip import api

    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        folder = RunFolder(api.train(chosen, resume=run.path if run else AUTO if resume else None))
    if json and is_main_rank():
        print(folder.summary.read_text(encoding="utf-8"), end="")
    return 0


def train_help(arguments: Sequence[str]) -> str:
    """The help of the settings' sections that the arguments name, or the whole help page."""
    sections = [argument for argument in arguments if argument in SECTION_NAMES]
    return help_text(sections) if sections else help_page(train, help_text())


def doctor(
    data: str, recipe: str = "", *, ranks: Count = 1, page: str = "", json: bool = False, settings: list[str]
) -> int:
    """neuclip doctor DATA [RECIPE] [--section.field value ...]

    Checks a run before you train it: builds it as training would, reads its first pairs, takes one step, and reports
    problems and warnings. No run folder is written. Exits with 0 if training would start, with 1 if it would fail.
    DATA is what --data.train accepts. RECIPE is a YAML file or a shipped recipe (finetune, locked, tiny). The default
    is tiny. For the flags of the settings: neuclip train --help

    --ranks: number of ranks that the run will have
    --page: write an HTML page with the first pairs and all results to this file

    neuclip doctor icons-30k
    neuclip doctor 'shards/{00000..00019}.tar' tiny --train.batch_size 512 --ranks 8 --json
    """
    if any(flag.startswith("--data.train=") for flag in settings):
        raise UserError("the data is given twice; remove --data.train")
    chosen = read_settings(Path(recipe) if recipe else None, [*settings, f"--data.train={data}"])
    with waiting("loading torch"):
        from neuclip.runs.doctor import examine, pairs_page

    examination = examine(chosen, ranks=ranks)
    if page:
        from neuclip.report.page import render_html, write_page

        write_page(Path(page), render_html(pairs_page(examination, without_queries(data))))
    if json:
        print_json(examination.as_plain())
    else:
        print_examination(examination)
    return 0 if examination.ready else 1


def print_examination(examination: Any) -> None:
    width = shutil.get_terminal_size((WIDTH, 40)).columns
    warnings = ["warning: {}: {}; {}".format(*advice) for advice in examination.warnings]
    problems = [f"problem: {problem}" for problem in examination.problems]
    for line in [*examination.lines, *warnings, *problems, "ready" if examination.ready else "not ready"]:
        print(textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def recipe(setting: str = "", objective: str = Settings.objective_name, *, json: bool = False) -> int:
    """neuclip recipe [SETTING] [OBJECTIVE]

    Prints the settings of one of the paper's runs as YAML, with the source of each number. Without SETTING, it lists
    the settings and objectives.
    SETTING is a data set of the paper's Table 1 (cc3m, cc12m, dfn-14m, dfn-192m, dfn-1b).
    OBJECTIVE is clip, siglip, fastclip, amorlip or neuclip [default: neuclip].
    To train with it, save it (neuclip recipe cc3m > cc3m.yaml), set data.train in the file to your data, and run
    neuclip train cc3m.yaml

    neuclip recipe cc3m
    neuclip recipe dfn-14m fastclip --json
    """
    if not setting:
        if json:
            return print_json({"settings": paper_settings(), "objectives": paper_objectives()})
        return print_recipes()
    setting, objective = setting.lower(), objective.lower()
    check_names(setting, objective)
    if json:
        return print_json(settings_as_dict(read_paper(setting, objective)))
    print(paper_yaml(setting, objective), end="")
    return 0


def check_names(setting: str, objective: str) -> None:
    if setting in paper_objectives():
        raise UserError(f"{setting} is an objective; name the setting first: {read_page(recipe).usage}")
    if setting not in paper_settings():
        raise UserError(f"no setting {setting!r} in the paper; {proposal(setting, paper_settings())}")
    if objective not in paper_objectives():
        raise UserError(f"no objective {objective!r} in the paper; {proposal(objective, paper_objectives())}")


def print_recipes() -> int:
    from neuclip.report.page import Table, text_table

    rows = []
    for name in paper_settings():
        settings, lines = read_paper(name, Settings.objective_name), paper_lines(name, Settings.objective_name)
        batch, steps = settings.train.batch_size, settings.train.samples // settings.train.batch_size
        pairs, samples = lines["setting.pairs"][0], lines["train.samples"][0]
        rows.append([name, pairs, settings.model.name, f"{batch:,}", samples, f"{steps:,}"])
    print(text_table(Table("", ["setting", "pairs", "model", "batch", "samples", "steps"], rows)))
    print("".join(f"{name:<10}{first_line(OBJECTIVES[name])}\n" for name in paper_objectives()))
    print("To save a recipe: neuclip recipe SETTING OBJECTIVE > FILE, such as neuclip recipe cc3m neuclip > cc3m.yaml")
    return 0
