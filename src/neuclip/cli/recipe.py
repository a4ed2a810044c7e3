"""`neuclip recipe`"""

from __future__ import annotations

from collections.abc import Sequence

from neuclip.cli.flags import JSON, Command
from neuclip.cli.tables import aligned, print_json
from neuclip.errors import UserError
from neuclip.settings.help import first_line
from neuclip.settings.nearest import any_of, proposal
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.paper import PaperRecipe, paper_objectives, paper_recipe, paper_settings
from neuclip.settings.sections import Settings
from neuclip.settings.writing import settings_as_dict

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
    recipe = find_paper_recipe(*[name.lower() for name in names])
    if as_json:
        print_json(settings_as_dict(recipe.settings()))
    else:
        print(recipe.as_yaml(), end="")
    return 0


def find_paper_recipe(setting: str, objective: str = Settings.objective_name) -> PaperRecipe:
    if setting in paper_objectives():
        raise UserError(f"{setting} is an objective; name the setting first: neuclip {COMMAND.usage}")
    if setting not in paper_settings():
        raise UserError(f"no setting {setting!r} in the paper; {proposal(setting, paper_settings())}")
    if objective not in paper_objectives():
        raise UserError(f"no objective {objective!r} in the paper; {proposal(objective, paper_objectives())}")
    return paper_recipe(setting, objective)


def print_list() -> None:
    rows = [["setting", "pairs", "model", "batch", "samples", "steps"]]
    for name in paper_settings():
        recipe = paper_recipe(name, Settings.objective_name)
        pairs, samples = recipe.lines["setting.pairs"][0], recipe.lines["train.samples"][0]
        model, train = recipe.settings().model.name, recipe.settings().train
        steps = train.samples // train.batch_size
        rows.append([name, pairs, model, f"{train.batch_size:,}", samples, f"{steps:,}"])
    print(aligned(rows))
    print("".join(f"{name:<10}{first_line(OBJECTIVES[name])}\n" for name in paper_objectives()))
    print("To get one run: neuclip recipe SETTING OBJECTIVE, for example neuclip recipe cc3m neuclip > cc3m.yaml")
