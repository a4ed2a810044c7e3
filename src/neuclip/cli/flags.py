"""What a command accepts, declared once: parsing, help and examples come from the same place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neuclip.errors import UserError, nearest
from neuclip.settings.options import check_value
from neuclip.settings.reading import split_flags
from neuclip.settings.values import RawValue
from neuclip.settings.writing import flag_lines, takes


@dataclass(frozen=True)
class Flag:
    """A flag of a command that is not a setting of a run. A bool is a switch: bare means true."""

    name: str
    declared: Any
    help: str
    at_least: float | None = None
    at_most: float | None = None

    def convert(self, value: str | None) -> Any:
        raw = RawValue(self.name, value)
        converted = raw.convert(self.declared)
        limits = {"at_least": self.at_least, "at_most": self.at_most}
        try:
            check_value(converted, self.declared, {name: limit for name, limit in limits.items() if limit is not None})
        except ValueError as error:
            raise raw.error(f"{self.name} is {value}; {error}") from None
        return converted


@dataclass(frozen=True)
class Command:
    """A command's interface: `usage` without the word neuclip, `about` in two sentences."""

    usage: str
    about: str
    flags: tuple[Flag, ...]
    examples: tuple[str, ...]
    fewest: int = 1  # arguments that are not flags
    most: int = 1

    def parse(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """Arguments that are not flags, and the values of the given flags: (['runs/x'], {'batch_size': 64})."""
        operands, values, _ = self.split(arguments, allow_settings=False)
        return operands, values

    def split(
        self, arguments: Sequence[str], *, allow_settings: bool = True
    ) -> tuple[list[str], dict[str, Any], list[str]]:
        """As `parse`, and the flags that are not this command's own, for `read_settings`."""
        own = {flag.name.replace("-", "_"): flag for flag in self.flags}
        switches = [name for name, flag in own.items() if flag.declared is bool]
        operands: list[str] = []
        values: dict[str, Any] = {}
        others: list[str] = []
        for name, value in split_flags(arguments, switches):
            if name is None:
                operands.append(value or "")
            elif name in own:
                values[name] = own[name].convert(value)
            else:
                self.check_unknown(name, allow_settings)
                others.append(f"--{name}" if value is None else f"--{name}={value}")
        self.check_operands(operands)  # last: a mistyped switch has taken the argument after it
        return operands, values, others

    def check_unknown(self, name: str, allow_settings: bool) -> None:
        """Refuse a flag that is not this command's own and cannot be a setting."""
        known = [flag.name for flag in self.flags]
        near = nearest(name, known)
        if near and not (allow_settings and "." in name):
            raise UserError(f"no flag --{name}; did you mean --{near}?")
        if not allow_settings:
            raise UserError(f"no flag --{name}; the flags are {', '.join(f'--{flag}' for flag in known) or 'none'}")

    def check_operands(self, operands: list[str]) -> None:
        for operand in operands:
            if operand.startswith("-"):
                raise UserError(f"no flag {operand!r}; flags begin with two dashes: neuclip {self.usage}")
        if len(operands) < self.fewest:
            raise UserError(f"an argument is missing; give neuclip {self.usage}")
        if len(operands) > self.most:
            raise UserError(f"unexpected {operands[self.most]!r}; give neuclip {self.usage}")

    def help(self, more: str = "") -> str:
        examples = "".join(f"  {example}\n" for example in self.examples)
        heading = "examples" if len(self.examples) > 1 else "example"
        parts = [f"usage: neuclip {self.usage}\n", f"{self.about}\n", self.flags_help(), more]
        return "\n".join(part for part in [*parts, f"{heading}:\n{examples}"] if part)

    def flags_help(self) -> str:
        return flag_lines(
            [
                (f"--{flag.name}" if flag.declared is bool else f"--{flag.name} {takes(flag.declared)}", flag.help)
                for flag in self.flags
            ]
        )


JSON = Flag("json", bool, "print the result as JSON on stdout")
