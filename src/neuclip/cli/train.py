"""`neuclip train`, and what is done before it: `neuclip doctor`, `neuclip recipe`."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from neuclip.cli.command import Count, find_run, help_page, is_main_rank, print_json, read_page
from neuclip.errors import RunFailed, UserError, proposal
from neuclip.progress import waiting
from neuclip.records import RunFolder
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.paper import paper_lines, paper_objectives, paper_settings, paper_yaml, read_paper
from neuclip.settings.reading import SECTION_NAMES, read_settings
from neuclip.settings.sections import Settings
from neuclip.settings.writing import first_line, help_text, settings_as_dict

AUTO: Literal["auto"] = "auto"  # as the run to resume
WIDTH = 120  # of doctor's page if the output is not a terminal


def train(recipe: str = "", *, resume: str = "", json: bool = False, settings: list[str]) -> int:
    """neuclip train [RECIPE] [--section.field value ...] | neuclip train --resume RUN

    Trains a model and writes a run folder: records, checkpoints, the model for open_clip and a report.
    RECIPE is a YAML file or a shipped recipe (finetune, locked, tiny) [default: tiny]. Flags override it.
    On several GPUs, or with several ranks on the CPU: torchrun --nproc-per-node N -m neuclip train ...
    Help on one section of the settings: neuclip train --help optimizer

    --resume: continue this run from its last checkpoint with its own settings; auto: that of --run.name, if any
    --json: print the run's summary as JSON on stdout at the end, everything else on stderr

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
    """Of the sections that are named, or the whole page."""
    sections = [argument for argument in arguments if argument in SECTION_NAMES]
    return help_text(sections) if sections else help_page(train, help_text())


def doctor(
    data: str,
    recipe: str = "",
    *,
    ranks: Count = 1,
    sample: Annotated[int | None, {"at_least": 1}] = None,
    sheet: str = "",
    json: bool = False,
    settings: list[str],
) -> int:
    """neuclip doctor DATA [RECIPE] [--section.field value ...]

    Reads some of the pairs and reports in seconds what training on them with these settings would do.
    DATA is what --data.train accepts. RECIPE is a YAML file or a shipped recipe (finetune, locked, tiny).
    The default is tiny. Exits with 0 if training would start, with 1 if it would fail. Settings: neuclip train --help

    --ranks: number of ranks of the run
    --sample: pairs to read and decode [default: 500, or as many as five seconds allow]
    --sheet: where to write the contact sheet (PNG) [default: in a new temporary folder]

    neuclip doctor icons-30k
    neuclip doctor 'shards/{00000..00019}.tar' tiny --train.batch_size 512 --ranks 8 --json
    """
    if any(flag.startswith("--data.train=") for flag in settings):
        raise UserError("the data is given twice; remove --data.train")
    chosen = read_settings(Path(recipe) if recipe else None, [*settings, f"--data.train={data}"])
    with waiting("loading torch"):
        from neuclip.doctor.diagnosis import examine
    from neuclip.doctor.contact_sheet import contact_sheet, draws_images, strip
    from neuclip.doctor.page import page_text
    from neuclip.runs.pretrained import resolve_model

    findings, probe = examine(resolve_model(chosen), ranks=ranks, sample=sample)
    if probe.shown:
        findings.note("sample", sheet=write_sheet(contact_sheet(probe.shown), sheet))
    if json:
        print_json(findings.as_plain())
    else:
        width = shutil.get_terminal_size((WIDTH, 40)).columns
        if draws_images(sys.stdout):
            print(strip(probe.shown, width), end="")
        print(page_text(findings, width), end="")
    return 0 if findings.ready else 1


def write_sheet(sheet: Any, place: str) -> str:
    """Where it was written: without `place` in a new folder of this user, which nobody else can have prepared."""
    from neuclip.files import new_file

    path = Path(place)
    try:
        path = Path(place or Path(tempfile.mkdtemp(prefix="neuclip-doctor-"), "contact_sheet.png"))
        if path.exists() and not path.is_file():
            raise RunFailed(f"{path} is not a file; give another --sheet")
        with new_file(path) as unfinished:  # moved to its place: a link there is replaced, not followed
            sheet.save(unfinished, "PNG")
    except OSError as error:
        raise RunFailed(f"cannot write {path} ({error.strerror or error}); give another --sheet") from error
    return str(path)


def recipe(setting: str = "", objective: str = Settings.objective_name, *, json: bool = False) -> int:
    """neuclip recipe [SETTING] [OBJECTIVE]

    Prints the settings of a run of the paper as YAML, with the source of each number; without SETTING a list.
    SETTING is a data set of the paper's Table 1 (cc3m, cc12m, dfn-14m, dfn-192m, dfn-1b).
    OBJECTIVE is clip, siglip, fastclip, amorlip or neuclip [default: neuclip].
    Write it to a file (> cc3m.yaml), set data.train to your data, then: neuclip train cc3m.yaml

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
    print("To get one run: neuclip recipe SETTING OBJECTIVE, for example neuclip recipe cc3m neuclip > cc3m.yaml")
    return 0
