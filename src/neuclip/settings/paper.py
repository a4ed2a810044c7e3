"""The paper's runs: the settings of its Table 1 with every objective, composed from `recipes/paper/`.

Each number is written once: in `everywhere.yaml`, in the file of the setting or in that of the objective. Later files
win, and an objective refers to a value of the setting by name: `rho: ${setting.rho}`. The comment after a number says
where it comes from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from neuclip.settings.keys import OBJECTIVE_KEY, SECTION_NAMES, section_fields
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.reading import build, convert_all
from neuclip.settings.recipe import SHIPPED, raw_value
from neuclip.settings.sections import Settings
from neuclip.settings.values import RawValue
from neuclip.settings.writing import scalar

FOLDER = SHIPPED / "paper"
LINE = re.compile(r"  (\w+): (.*?)(?: +# (.*))?")
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
COMMENT_COLUMN = 32

Lines = dict[str, tuple[str, str]]  # key -> value and origin, as written: {'train.batch_size': ('1024', 'Table 1')}


@dataclass(frozen=True)
class PaperRecipe:
    """One run of the paper. Keys `setting.*` are only for references, they are not settings of a run."""

    heading: list[str]
    lines: Lines

    def settings(self) -> Settings:
        """As `neuclip train` would read them."""
        values = [
            RawValue(key, raw_value(yaml.compose(value, Loader=yaml.SafeLoader)), "recipes/paper")
            for key, (value, _) in self.lines.items()
            if key.partition(".")[0] in SECTION_NAMES
        ]
        objective = self.lines[OBJECTIVE_KEY][0]
        return build(objective, convert_all(values, objective))

    def as_yaml(self) -> str:
        """A recipe with the origin of each value. Sections in which the paper specifies nothing are omitted, and so are
        values that the objective chooses."""
        settings = self.settings()
        text = "\n".join(self.heading) + "\n"
        for section in SECTION_NAMES:
            if not any(key.startswith(f"{section}.") for key in self.lines):
                continue
            text += f"\n{section}:\n"
            text += f"  name: {settings.objective_name}\n" if section == "objective" else ""
            for field, _ in section_fields(section, settings.objective_name):
                value = getattr(getattr(settings, section), field.name)
                written, origin = self.lines.get(f"{section}.{field.name}", (scalar(value), "default"))
                if value is not None:
                    text += f"{f'  {field.name}: {written}':<{COMMENT_COLUMN}}  # {origin}\n"
        return text


def paper_settings() -> list[str]:
    """The names of the settings, small to large."""
    names = [path.stem for path in (FOLDER / "settings").glob("*.yaml")]
    return sorted(names, key=lambda name: paper_recipe(name, Settings.objective_name).settings().train.samples)


def paper_objectives() -> list[str]:
    """The names of the objectives that the paper compares."""
    return [name for name in OBJECTIVES if (FOLDER / "objectives" / f"{name}.yaml").is_file()]


def paper_recipe(setting: str, objective: str) -> PaperRecipe:
    """The run of one of `paper_settings()` with one of `paper_objectives()`.

    >>> paper_recipe("cc3m", "neuclip").settings().train.batch_size
    1024
    """
    shared = FOLDER / "everywhere.yaml"
    of_setting, of_objective = FOLDER / "settings" / f"{setting}.yaml", FOLDER / "objectives" / f"{objective}.yaml"
    lines: Lines = {}
    for file in (shared, of_setting, of_objective):
        lines |= read_lines(file, lines)
    return PaperRecipe([*heading(of_setting), *heading(of_objective), *heading(shared)], lines)


def heading(file: Path) -> list[str]:
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")]


def read_lines(file: Path, known: Lines) -> Lines:
    """The lines of one file; `${...}` refers to a value of the files before it."""
    lines: Lines = {}
    section = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if match := LINE.fullmatch(line):
            filled = REFERENCE.sub(lambda key: known[key[1]][0], f"{match[2]}\n{match[3] or ''}")
            value, _, origin = filled.partition("\n")
            lines[f"{section}.{match[1]}"] = (value, origin)
        elif line and not line.startswith("#"):
            section = line.partition(":")[0]
    return lines
