"""Writes settings as YAML, which gives the same settings when it is read again, and as the help of every option."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml

from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.options import choices_of, types_of
from neuclip.settings.reading import SECTION_NAMES, read_settings, section_type
from neuclip.settings.sections import Settings

HEADER = "# All settings of one run. To repeat the run: neuclip train settings.yaml --run.name ANOTHER_NAME\n"
WIDTH = 110
INDENT = 44


def settings_as_dict(settings: Settings) -> dict[str, dict[str, Any]]:
    """All sections with all options; the section `objective` begins with the objective's name."""
    sections = {name: getattr(settings, name) for name in SECTION_NAMES}
    values = {
        name: {field.name: getattr(section, field.name) for field in fields(section)}
        for name, section in sections.items()
    }
    return values | {"objective": {"name": settings.objective_name, **values["objective"]}}


def settings_as_yaml(settings: Settings) -> str:
    text = HEADER
    for section, values in settings_as_dict(settings).items():
        text += f"\n{section}:\n" + "".join(f"  {name}: {scalar(value)}\n" for name, value in values.items())
    return text


def scalar(value: Any) -> str:
    """One value on one line, in quotes if YAML would otherwise read another type."""
    value = list(value) if isinstance(value, tuple) else value
    # Line breaks and their like must be escaped: between single quotes PyYAML reads U+0085 back as a space.
    printable = all(
        text.isprintable() for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)
    )
    style: dict[str, Any] = {"allow_unicode": True} if printable else {"default_style": '"', "allow_unicode": False}
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), **style)
    return text.removesuffix("\n").removesuffix("\n...")


def help_text(sections: Sequence[str] = SECTION_NAMES) -> str:
    """The help of all options of these sections."""
    tiny = read_settings()
    text = []
    for section in sections:
        if section != "objective":
            text.append(section_help(section, section_type(section, ""), getattr(tiny, section), section))
            continue
        choice = f"the training objective; its fields are listed below [default: {Settings.objective_name}]"
        text.append("objective: Training objective. Each has its own fields.\n")
        text[-1] += flag_lines([(f"--objective {'|'.join(OBJECTIVES)}", choice)])
        for name, kind in OBJECTIVES.items():
            values = tiny.objective if name == tiny.objective_name else kind()
            text[-1] += section_help(f"objective {name}", kind, values, section)
    return "\n".join(text)


def section_help(title: str, kind: type, tiny: Any, section: str) -> str:
    rows = []
    for option in fields(kind):
        value = getattr(tiny, option.name)
        defaults = [f"default: {as_typed(option.default)}"] if option.default not in ("", None) else []
        defaults += [f"tiny: {as_typed(value)}"] if value != option.default else []
        help = option.metadata["help"] + (f" [{'; '.join(defaults)}]" if defaults else "")
        rows.append((f"--{section}.{option.name} {takes(types_of(kind)[option.name])}", help))
    return f"{title}: {first_line(kind)}\n" + (flag_lines(rows) or "  no fields\n")


def first_line(kind: type) -> str:
    return (kind.__doc__ or "").splitlines()[0]


def takes(declared: Any) -> str:
    """The placeholder for a flag's value in its help: N, X, TEXT, true|false, the choices, or a list of these."""
    if choices := choices_of(declared):
        return "|".join(choices)
    if get_origin(declared) in (Union, UnionType):  # X | None
        return takes(get_args(declared)[0])
    if get_origin(declared) is tuple:
        items = [takes(item) for item in get_args(declared) if item is not Ellipsis]
        return ",".join(items) + (",..." if Ellipsis in get_args(declared) else "")
    return {int: "N", float: "X", bool: "true|false", str: "TEXT"}[declared]


def as_typed(value: Any) -> str:
    """A value as the user would type it after its flag."""
    if isinstance(value, tuple):
        return ",".join(as_typed(item) for item in value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value != "" else "''"


def flag_lines(rows: Sequence[tuple[str, str]]) -> str:
    """The help of flags: flags on the left, wrapped help on the right; a long flag gets its own line."""
    text = ""
    for flag, help in rows:
        # "[default: ...]" stays on one line
        help = re.sub(r"\[[^][]*\]$", lambda match: match[0].replace(" ", "\u00a0"), help)
        lines = textwrap.wrap(help, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)
        left = f"  {flag}"
        if len(left) > INDENT - 2:
            text += left + "\n"
            left = ""
        for line in lines:
            text += f"{left:<{INDENT}}{line}\n".replace("\u00a0", " ")
            left = ""
    return text
