"""`neuclip recipe`"""

from __future__ import annotations

from collections.abc import Sequence

from neuclip.cli.flags import JSON, Command
from neuclip.cli.tables import aligned, print_json
from neuclip.errors import UserError, any_of, proposal
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.paper import paper_lines, paper_objectives, paper_settings, paper_yaml, read_paper
from neuclip.settings.sections import Settings
from neuclip.settings.writing import first_line, settings_as_dict

COMMAND = Command(
    usage="recipe [SETTING] [OBJECTIVE]",
    about=f"""Prints the settings of a run of the paper as YAML, with the source of each number; without SETTING a list.
SETTING is a data set of the paper's Table 1 ({", ".join(paper_settings())}).
OBJECTIVE is {any_of(paper_objectives())} [default: {Settings.objective_name}].
Write it to a file (> cc3m.yaml), set data.train to your data, then: neuclip train cc3m.yaml""",
    flags=(JSON,),
    examples=("neuclip recipe cc3m", "neuclip recipe dfn-14m fastclip --json"),
    fewest=0,
    most=2,
)


def run(arguments: Sequence[str]) -> int:
    names, values = COMMAND.parse(arguments)
    as_json = values.get(JSON.name, False)
    if not names:
        print_json({"settings": paper_settings(), "objectives": paper_objectives()}) if as_json else print_list()
        return 0
    setting, objective = [*(name.lower() for name in names), Settings.objective_name][:2]
    check_names(setting, objective)
    if as_json:
        print_json(settings_as_dict(read_paper(setting, objective)))
    else:
        print(paper_yaml(setting, objective), end="")
    return 0


def check_names(setting: str, objective: str) -> None:
    if setting in paper_objectives():
        raise UserError(f"{setting} is an objective; name the setting first: neuclip {COMMAND.usage}")
    if setting not in paper_settings():
        raise UserError(f"no setting {setting!r} in the paper; {proposal(setting, paper_settings())}")
    if objective not in paper_objectives():
        raise UserError(f"no objective {objective!r} in the paper; {proposal(objective, paper_objectives())}")


def print_list() -> None:
    rows = [["setting", "pairs", "model", "batch", "samples", "steps"]]
    for name in paper_settings():
        settings, lines = read_paper(name, Settings.objective_name), paper_lines(name, Settings.objective_name)
        batch, steps = settings.train.batch_size, settings.train.samples // settings.train.batch_size
        pairs, samples = lines["setting.pairs"][0], lines["train.samples"][0]
        rows.append([name, pairs, settings.model.name, f"{batch:,}", samples, f"{steps:,}"])
    print(aligned(rows))
    print("".join(f"{name:<10}{first_line(OBJECTIVES[name])}\n" for name in paper_objectives()))
    print("To get one run: neuclip recipe SETTING OBJECTIVE, for example neuclip recipe cc3m neuclip > cc3m.yaml")
