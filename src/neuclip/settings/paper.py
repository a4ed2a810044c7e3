"""The paper's runs: the settings of its Table 1 with every objective, composed from `recipes/paper/`.

Each number is written once: in `everywhere.yaml`, in the file of the setting or in the file of the objective. Later
files override earlier ones, and an objective refers to a value of the setting by name: `rho: ${setting.rho}`. The
comment after a number says where it comes from.
"""

from __future__ import annotations

import re
from pathlib import Path

from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.reading import SECTION_NAMES, SHIPPED, build_settings, parse_recipe
from neuclip.settings.sections import Settings

FOLDER = SHIPPED / "paper"
LINE = re.compile(r"  (\w+): (.*?)(?: +# (.*))?")
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
COMMENT_COLUMN = 32

Lines = dict[str, tuple[str, str]]  # key -> value and origin, as written: {'train.batch_size': ('1024', 'Table 1')}


def paper_settings() -> list[str]:
    """The names of the settings, small to large."""
    names = [path.stem for path in (FOLDER / "settings").glob("*.yaml")]
    return sorted(names, key=lambda name: read_paper(name, Settings.objective_name).train.samples)


def paper_objectives() -> list[str]:
    """The names of the objectives that the paper compares."""
    return [name for name in OBJECTIVES if (FOLDER / "objectives" / f"{name}.yaml").is_file()]


def read_paper(setting: str, objective: str) -> Settings:
    """The settings of a run: one of `paper_settings()` with one of `paper_objectives()`.

    >>> read_paper("cc3m", "neuclip").train.batch_size
    1024
    """
    return build_settings(parse_recipe(paper_yaml(setting, objective), "recipes/paper"))


def paper_yaml(setting: str, objective: str) -> str:
    """The recipe of the run that `read_paper` reads, with the origin of each value as a comment."""
    files = paper_files(setting, objective)
    comments = [
        line for file in files[::-1] for line in file.read_text(encoding="utf-8").splitlines() if line[:1] == "#"
    ]
    text, lines = "\n".join(comments) + "\n", paper_lines(setting, objective)
    for section in SECTION_NAMES:
        fields = {key.partition(".")[2]: line for key, line in lines.items() if key.startswith(f"{section}.")}
        text += f"\n{section}:\n" if fields else ""
        for name, (value, origin) in fields.items():
            text += f"{f'  {name}: {value}':<{COMMENT_COLUMN}}  # {origin}\n" if origin else f"  {name}: {value}\n"
    return text


def paper_lines(setting: str, objective: str) -> Lines:
    """Every value with its origin. Keys `setting.*` exist only for references; they are not settings of a run."""
    lines: Lines = {}
    for file in paper_files(setting, objective):
        section = ""
        for line in file.read_text(encoding="utf-8").splitlines():
            if match := LINE.fullmatch(line):
                filled = [REFERENCE.sub(lambda key: lines[key[1]][0], part or "") for part in match.groups()[1:]]
                lines[f"{section}.{match[1]}"] = (filled[0], filled[1])
            elif line and not line.startswith("#"):
                section = line.partition(":")[0]
    return lines


def paper_files(setting: str, objective: str) -> list[Path]:
    return [
        FOLDER / "everywhere.yaml",
        FOLDER / "settings" / f"{setting}.yaml",
        FOLDER / "objectives" / f"{objective}.yaml",
    ]
