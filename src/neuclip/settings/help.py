"""Help for every setting: its flag, type, meaning and default, and its value in the recipe `tiny`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from neuclip.settings.keys import SECTION_NAMES, section_fields, section_type
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings

WIDTH = 110
INDENT = 44


def help_text(sections: Sequence[str] = SECTION_NAMES) -> str:
    """All fields of these sections, grouped."""
    tiny = read_settings()
    return "\n".join(section_help(section, tiny) for section in sections)


def section_help(section: str, tiny: Settings) -> str:
    if section != "objective":
        heading = f"{section}: {first_line(section_type(section, tiny.objective_name))}\n"
        return heading + field_lines(section, tiny.objective_name, getattr(tiny, section))
    choice = f"the training objective; its fields are listed below [default: {Settings.objective_name}]"
    text = "objective: Training objective. Each has its own fields.\n"
    text += flag_lines([(f"--objective {'|'.join(OBJECTIVES)}", choice)])
    for name, kind in OBJECTIVES.items():
        text += f"objective {name}: {first_line(kind)}\n"
        text += field_lines(section, name, tiny.objective if name == tiny.objective_name else kind())
    return text


def field_lines(section: str, objective: str, tiny: Any) -> str:
    rows = []
    for field, declared in section_fields(section, objective):
        value = getattr(tiny, field.name)
        defaults = [f"default: {as_typed(field.default)}"] if field.default not in ("", None) else []
        defaults += [f"tiny: {as_typed(value)}"] if value != field.default else []
        help = field.metadata["help"] + (f" [{'; '.join(defaults)}]" if defaults else "")
        rows.append((f"--{section}.{field.name} {takes(declared)}", help))
    return flag_lines(rows) or "  no fields\n"


def first_line(kind: type) -> str:
    return (kind.__doc__ or "").splitlines()[0]


def takes(declared: Any) -> str:
    """What a flag of this type takes: N, X, TEXT, true|false, the choices, or a list of them."""
    if get_origin(declared) is Literal:
        return "|".join(get_args(declared))
    if get_origin(declared) in (Union, UnionType):  # X | None
        return takes(get_args(declared)[0])
    if get_origin(declared) is tuple:
        items = [takes(item) for item in get_args(declared) if item is not Ellipsis]
        return ",".join(items) + (",..." if Ellipsis in get_args(declared) else "")
    return {int: "N", float: "X", bool: "true|false", str: "TEXT"}[declared]


def as_typed(value: Any) -> str:
    """A value as it is typed after its flag."""
    if isinstance(value, tuple):
        return ",".join(as_typed(item) for item in value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value != "" else "''"


def flag_lines(rows: Sequence[tuple[str, str]]) -> str:
    """Flags on the left, their wrapped help on the right; a long flag gets its own line."""
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
