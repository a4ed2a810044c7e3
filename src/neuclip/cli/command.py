"""A command is a function: its positional parameters are the arguments, its keyword parameters are flags with their
types and defaults, and its docstring is the help page.

The docstring has, separated by empty lines: the usage, what the command does, one entry `--flag: help` for each flag as
it is typed, and examples. `--batch-size` and `--data.caption_key` are the parameters `batch_size` and
`data_caption_key`; `with_` is `--with`. A parameter `settings` receives all flags that are settings of a run, as typed.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from neuclip.errors import UserError, nearest
from neuclip.records import RunFolder, strict
from neuclip.settings.options import check_value
from neuclip.settings.reading import split_flags
from neuclip.settings.sections import RunSettings
from neuclip.settings.values import RawValue
from neuclip.settings.writing import as_typed, flag_lines, takes

Command = Callable[..., int]
Count = Annotated[int, {"at_least": 1}]
Share = Annotated[float, {"at_least": 0, "at_most": 1}]

SETTINGS = "settings"
JSON_HELP = "print the result as JSON on stdout"


class Flag(NamedTuple):
    """A keyword parameter of a command, as the user sees it."""

    name: str  # as typed: 'batch-size'
    declared: Any
    limits: dict[str, float]
    default: Any
    help: str

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty

    def convert(self, value: str | None) -> Any:
        raw = RawValue(self.name, value)
        converted = raw.convert(self.declared)
        try:
            check_value(converted, self.declared, self.limits)
        except ValueError as error:
            raise raw.error(f"{self.name} is {value}; {error}") from None
        return converted


class Page(NamedTuple):
    """The parts of a command's docstring."""

    usage: str
    about: list[str]  # paragraphs
    flags: dict[str, str]  # help text by name of the flag, as typed
    examples: list[str]


def read_page(command: Command) -> Page:
    usage, *about, examples = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    entries = [entry for part in about if part.startswith("--") for entry in re.split(r"\n(?=--)", part)]
    flags = dict(" ".join(entry.split()).removeprefix("--").split(": ", 1) for entry in entries)
    return Page(usage, [part for part in about if not part.startswith("--")], flags, examples.splitlines())


def flags_of(command: Command) -> dict[str, Flag]:
    """The flags of a command by parameter, in the order of the help page. `--json` comes last and has a default help
    text."""
    helps = read_page(command).flags
    parameters = inspect.signature(command).parameters
    if "json" in parameters:
        helps = {**helps, "json": helps.get("json", JSON_HELP)}
    types, annotated = get_type_hints(command), get_type_hints(command, include_extras=True)
    flags = {}
    for name, help in helps.items():
        plain = re.sub(r"[-.]", "_", name)
        parameter = plain if plain in parameters else f"{plain}_"  # a Python keyword, such as with
        limits: dict[str, float] = getattr(annotated[parameter], "__metadata__", ({},))[0]
        flags[parameter] = Flag(name, types[parameter], limits, parameters[parameter].default, help)
    return flags


# --- Calling a command with typed arguments --------------------------------------------------------------------------


def call(command: Command, arguments: Sequence[str]) -> int:
    """Run a command with the arguments that the user typed, and return its exit code."""
    flags, takes_settings = flags_of(command), SETTINGS in inspect.signature(command).parameters
    by_name = {parameter.removesuffix("_"): parameter for parameter in flags}
    switches = [name for name, parameter in by_name.items() if flags[parameter].declared is bool]
    operands: list[str] = []
    values: dict[str, Any] = {}
    settings: list[str] = []
    for name, value in split_flags(arguments, switches):
        if name is None:
            operands.append(value or "")
        elif parameter := by_name.get(name.replace(".", "_")):
            converted = flags[parameter].convert(value)
            if isinstance(converted, tuple):  # a list may come in several flags
                converted = (*values.get(parameter, ()), *converted)
            values[parameter] = converted
        else:
            refuse_unknown(name, flags.values(), takes_settings=takes_settings)
            settings.append(f"--{name}" if value is None else f"--{name}={value}")
    check_operands(command, operands)  # after the flags: a mistyped switch has consumed the argument after it
    if missing := [f"--{flag.name}" for name, flag in flags.items() if flag.is_required and name not in values]:
        raise UserError(f"{missing[0]} is missing; usage: {read_page(command).usage}")
    return command(*operands, **values, **({SETTINGS: settings} if takes_settings else {}))


def refuse_unknown(name: str, flags: Iterable[Flag], *, takes_settings: bool) -> None:
    """Raise a UserError for a flag that the command does not have, unless it may be a setting."""
    known = [flag.name for flag in flags]
    typed = name if "." in name else name.replace("_", "-")
    near = nearest(typed, known)
    if near and not (takes_settings and "." in name):
        raise UserError(f"no flag --{typed}; did you mean --{near}?")
    if not takes_settings:
        raise UserError(f"no flag --{typed}; the flags are {', '.join(f'--{flag}' for flag in known) or 'none'}")


def check_operands(command: Command, operands: Sequence[str]) -> None:
    usage, parameters = read_page(command).usage, inspect.signature(command).parameters.values()
    single = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    any_number = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    fewest = sum(one.default is one.empty for one in single)
    for operand in operands:
        if operand.startswith("-"):
            raise UserError(f"no flag {operand!r}; flags begin with two dashes; usage: {usage}")
    if len(operands) < fewest:
        raise UserError(f"an argument is missing; usage: {usage}")
    if len(operands) > len(single) and not any_number:
        raise UserError(f"unexpected argument {operands[len(single)]!r}; usage: {usage}")


def help_page(command: Command, more: str = "") -> str:
    """The help page of a command; `more` is inserted between its flags and its examples."""
    page = read_page(command)
    rows = []
    for flag in flags_of(command).values():
        has_no_default = flag.is_required or flag.default is False or flag.default in ("", None, ())
        default = "" if has_no_default else f" [default: {as_typed(flag.default)}]"
        typed = f"--{flag.name}" if flag.declared is bool else f"--{flag.name} {takes(flag.declared)}"
        rows.append((typed, flag.help + default))
    examples = "".join(f"  {line}\n" for line in page.examples)
    heading = "examples" if len(page.examples) > 1 else "example"
    parts = [f"usage: {page.usage}\n", *(f"{text}\n" for text in page.about), flag_lines(rows), more]
    return "\n".join(part for part in [*parts, f"{heading}:\n{examples}"] if part)


# --- Shared by several commands --------------------------------------------------------------------------------------


def print_json(value: Any) -> int:
    print(json.dumps(strict(value), indent=2, allow_nan=False))
    return 0


def is_main_rank() -> bool:
    """Whether this is the rank that prints."""
    return os.environ.get("RANK", "0") == "0"


def find_run(name: str) -> RunFolder:
    """The run at this path; raises a UserError that names the most similar run if there is none."""
    path = Path(name)
    if RunFolder(path).settings.is_file():
        return RunFolder(path)
    what = f"{path} is not a run: it has no settings.yaml" if path.exists() else f"no run at {path}"
    raise UserError(f"{what}; {runs_beside(path)}")


def runs_beside(path: Path) -> str:
    """A remedy for an error: the run with the name most similar to `path`, or all runs, in its folder or in the default
    folder."""
    for folder in dict.fromkeys([path.parent, Path(RunSettings.folder)]):
        runs = {run.parent.name: run.parent for run in sorted(folder.glob("*/settings.yaml"))}
        if near := nearest(path.name, runs):
            return f"did you mean {runs[near]}?"
        if runs:
            return f"{folder} contains {', '.join(runs)}"
    return "start one with: neuclip train"


def check_target(target: str) -> None:
    """Raise a UserError for a path that does not exist. A bare word may be the name of a model, and is not checked."""
    is_path = os.sep in target and ":" not in target  # local-dir:/a/b is a model
    is_run_elsewhere = RunFolder(Path(RunSettings.folder) / target).settings.is_file()
    if (is_path or is_run_elsewhere) and not Path(target).exists():
        raise UserError(f"no run or checkpoint at {target}; {runs_beside(Path(target))}")
