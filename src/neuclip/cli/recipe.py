"""`neuclip recipe`"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from neuclip.cli.flags import JSON, Command, wants_help
from neuclip.cli.tables import aligned, print_json
from neuclip.errors import UserError
from neuclip.settings.help import first_line
from neuclip.settings.keys import SECTION_NAMES
from neuclip.settings.nearest import proposal
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.paper import PaperRecipe, paper_objectives, paper_recipe, paper_settings
from neuclip.settings.sections import Settings

COMMAND = Command(
    usage="recipe [SETTING] [OBJECTIVE]",
    about=f"""Prints the settings of one run of the paper as YAML, each number with its origin; without SETTING: a list.
SETTING is a data set of its Table 1 ({", ".join(paper_settings())}).
OBJECTIVE is one of {", ".join(paper_objectives())}; without it: {Settings.objective_name}.
Keep it (> cc3m.yaml), put your data in data.train, and train with it: neuclip train cc3m.yaml""",
    flags=(JSON,),
    examples=(
        "neuclip recipe cc3m",
        "neuclip recipe dfn-14m fastclip --json",
    ),
    fewest=0,
    most=2,
)


def run(arguments: Sequence[str]) -> int:
    if wants_help(arguments):
        print(COMMAND.help(), end="")
        return 0
    names, values = COMMAND.parse(arguments)
    as_json = values.get(JSON.name, False)
    if not names:
        print_json({"settings": paper_settings(), "objectives": paper_objectives()}) if as_json else print_list()
        return 0
    recipe = asked_recipe(*[name.lower() for name in names])
    print_json(as_plain(recipe.settings())) if as_json else print(recipe.as_yaml(), end="")
    return 0


def asked_recipe(setting: str, objective: str = Settings.objective_name) -> PaperRecipe:
    if setting in paper_objectives():
        raise UserError(f"{setting} is an objective; name the setting first: neuclip {COMMAND.usage}")
    if setting not in paper_settings():
        raise UserError(f"no setting {setting!r} in the paper; {proposal(setting, paper_settings())}")
    if objective not in paper_objectives():
        raise UserError(f"no objective {objective!r} in the paper; {proposal(objective, paper_objectives())}")
    return paper_recipe(setting, objective)


def as_plain(settings: Settings) -> dict[str, Any]:
    """All settings, those with a default too, section by section."""
    sections = {section: asdict(getattr(settings, section)) for section in SECTION_NAMES}
    return sections | {"objective": {"name": settings.objective_name, **sections["objective"]}}


def print_list() -> None:
    rows = [["setting", "pairs", "model", "batch", "samples", "steps"]]
    for name in paper_settings():
        recipe = paper_recipe(name, Settings.objective_name)
        settings, train = recipe.settings(), recipe.settings().train
        pairs, samples = recipe.lines["setting.pairs"][0], recipe.lines["train.samples"][0]
        steps = train.samples // train.batch_size
        rows.append([name, pairs, settings.model.name, f"{train.batch_size:,}", samples, f"{steps:,}"])
    print(aligned(rows))
    print("".join(f"{name:<10}{first_line(OBJECTIVES[name])}\n" for name in paper_objectives()))
    print("One run: neuclip recipe SETTING OBJECTIVE, for example: neuclip recipe cc3m neuclip > cc3m.yaml")
