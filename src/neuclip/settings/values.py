"""A value as a user gave it, and its conversion to the declared type of its field. Nothing is converted silently."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from neuclip.errors import UserError
from neuclip.settings.nearest import any_of, nearest
from neuclip.settings.secrets import between_commas, without_queries

NUMBER = re.compile(r"([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)(k|K|M|G|B|[kMG]B)?")
LEADING_ZERO = re.compile(r"[+-]?0\d")  # YAML 1.1 reads 012 as 10
SCALE = {"k": 10**3, "K": 10**3, "kB": 10**3, "M": 10**6, "MB": 10**6, "G": 10**9, "B": 10**9, "GB": 10**9}
WHOLE_NUMBER_LIMIT = 2**63


@dataclass(frozen=True)
class RawValue:
    """A value as given: text (also for numbers), a boolean, None (nothing), a list, or a dict (a group of fields).

    `place` is 'tiny.yaml line 12', or '' for a flag.
    """

    key: str
    value: Any
    place: str = ""

    def error(self, message: str) -> UserError:
        """The error about this value: its place, then `message`, which begins with a key."""
        if self.place:
            return UserError(f"{self.place}: {message}")
        return UserError(f"--{message}" if message.startswith(self.key) else f"--{self.key}: {message}")


def convert(raw: RawValue, declared: Any) -> Any:
    """The value as its declared type.

    >>> convert(RawValue("train.samples", "3M"), int)
    3000000
    >>> convert(RawValue("data.crop_scale", "0.8,1"), tuple[float, float])
    (0.8, 1.0)
    """
    if declared is bool and raw.value is None and not raw.place:
        return True  # a bare flag: --log.tensorboard
    try:
        return parse(raw.value, declared)
    except ValueError as error:
        raise raw.error(f"{raw.key} is {describe(raw.value)}; {error}") from None


def describe(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a group of fields"
    if isinstance(value, list):
        return f"[{', '.join(map(describe, value))}]"
    return repr(without_queries(value) if isinstance(value, str) else value)


def parse(value: Any, declared: Any) -> Any:
    """As `convert`, but raises ValueError with the remedy alone."""
    if get_origin(declared) is Literal:
        return parse_choice(value, get_args(declared))
    if get_origin(declared) in (Union, UnionType):  # X | None: the objective chooses
        return None if value in (None, "default") else parse(value, get_args(declared)[0])
    if get_origin(declared) is tuple:
        return parse_tuple(value, get_args(declared))
    return {int: parse_whole_number, float: parse_number, bool: parse_boolean, str: parse_text}[declared](value)


def parse_whole_number(value: Any) -> int:
    match = NUMBER.fullmatch(value) if isinstance(value, str) else None
    if not match or LEADING_ZERO.match(value):
        raise ValueError("give a whole number such as 128, 10k, 3M, 64G or 1e6")
    number = Decimal(match[1]) * SCALE.get(match[2], 1)
    if abs(number) >= WHOLE_NUMBER_LIMIT:
        raise ValueError("give a whole number below 2^63")
    if number != number.to_integral_value():
        raise ValueError("give a whole number, without a fraction")
    return int(number)


def parse_number(value: Any) -> float:
    match = NUMBER.fullmatch(value) if isinstance(value, str) else None
    if not match or match[2] or LEADING_ZERO.match(value.partition(".")[0]):
        raise ValueError("give a number such as 0.1 or 1e-3")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("give a finite number")
    return number


def parse_boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("give true or false")


def parse_text(value: Any) -> str:
    if isinstance(value, bool):
        raise ValueError("YAML reads this word as a boolean; put it in quotes to give a text")
    if not isinstance(value, str):
        raise ValueError("give a text; '' for none")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("give a text in UTF-8") from None
    return value


def parse_choice(value: Any, choices: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    near = nearest(value, choices) if isinstance(value, str) else ""
    raise ValueError(f"choose {any_of(choices)}" + (f" (did you mean {near}?)" if near else ""))


def parse_tuple(value: Any, declared: tuple[Any, ...]) -> tuple[Any, ...]:
    any_length = declared[-1] is Ellipsis
    if isinstance(value, str):
        empty = value.strip() in ("", "none")
        value = [] if empty else [item.strip() for item in between_commas(value)]
        if "" in value:
            raise ValueError("remove the extra comma")
    if not isinstance(value, list):
        raise ValueError("give values separated by commas" + (", or none" if any_length else ""))
    if not any_length and len(value) != len(declared):
        raise ValueError(f"give {len(declared)} values separated by commas")
    return tuple(parse(item, declared[0]) for item in value)
