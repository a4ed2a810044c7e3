"""A value as the user typed it, and its conversion to the declared type of its option."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from types import UnionType
from typing import Any, Union, get_args, get_origin

from neuclip.errors import UserError
from neuclip.secrets import between_commas, without_queries
from neuclip.settings.options import choices_of, parse_choice

NUMBER = re.compile(r"([+-]?(?!0\d)(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)(k|K|M|G|B|[kMG]B)?")  # not 012
SCALE = {"k": 10**3, "K": 10**3, "kB": 10**3, "M": 10**6, "MB": 10**6, "G": 10**9, "B": 10**9, "GB": 10**9}


@dataclass(frozen=True)
class RawValue:
    """A value as typed: text (also for numbers), a boolean, None (nothing), a list, or a dict (a group of fields).

    `location` is 'tiny.yaml line 12', or '' for a flag.
    """

    key: str
    value: Any
    location: str = ""

    def error(self, message: str) -> UserError:
        """The error about this value: its location, then `message`, which begins with a key."""
        if self.location:
            return UserError(f"{self.location}: {message}")
        return UserError(f"--{message}" if message.startswith(self.key) else f"--{self.key}: {message}")

    def convert(self, declared: Any) -> Any:
        """The value converted to its declared type. Raises UserError if that is not possible.

        >>> RawValue("train.samples", "3M").convert(int)
        3000000
        >>> RawValue("data.crop_scale", "0.8,1").convert(tuple[float, float])
        (0.8, 1.0)
        """
        if declared is bool and self.value is None and not self.location:
            return True  # a bare flag: --log.tensorboard
        try:
            return parse(self.value, declared)
        except ValueError as error:
            raise self.error(f"{self.key} is {describe(self.value)}; {error}") from None


def describe(value: Any) -> str:
    """The value as error messages show it."""
    if isinstance(value, list):
        return f"[{', '.join(map(describe, value))}]"
    words = {None: "empty", True: "true", False: "false"}
    return "a group of fields" if isinstance(value, dict) else words.get(value) or repr(without_queries(value))


def parse(value: Any, declared: Any) -> Any:
    """The value converted to its declared type. Raises ValueError, whose message is only the remedy."""
    if choices := choices_of(declared):
        return parse_choice(value, choices)
    if get_origin(declared) in (Union, UnionType):  # X | None, where None means that the objective chooses
        return None if value in (None, "default") else parse(value, get_args(declared)[0])
    if get_origin(declared) is tuple:
        return parse_tuple(value, get_args(declared))
    parsers: dict[Any, Callable[[Any], Any]] = {
        int: parse_whole,
        float: parse_number,
        bool: parse_boolean,
        str: parse_text,
    }
    return parsers[declared](value)


def parse_whole(value: Any) -> int:
    match = NUMBER.fullmatch(value) if isinstance(value, str) else None
    number = Decimal(match[1]) * SCALE.get(match[2], 1) if match else Decimal("0.5")
    if number != number.to_integral_value() or abs(number) >= 2**63:
        raise ValueError("give a whole number such as 128, 10k, 3M, 64G or 1e6")
    return int(number)


def parse_number(value: Any) -> float:
    match = NUMBER.fullmatch(value) if isinstance(value, str) else None
    if not match or match[2] or not math.isfinite(float(value)):
        raise ValueError("give a number such as 0.1 or 1e-3")
    return float(value)


def parse_boolean(value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ValueError("give true or false")
    return str(value).lower() == "true"


def parse_text(value: Any) -> str:
    if isinstance(value, bool):
        raise ValueError("YAML reads this word as a boolean; put it in quotes to give a text")
    if not isinstance(value, str) or value != value.encode(errors="replace").decode():
        raise ValueError("give a text in UTF-8; '' for none")
    return value


def parse_tuple(value: Any, declared: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tuple for 'a,b' or a list; '' and 'none' give an empty tuple. Commas inside braces do not separate."""
    any_length = declared[-1] is Ellipsis
    if isinstance(value, str):
        value = [] if value.strip() in ("", "none") else [item.strip() for item in between_commas(value)]
        if "" in value:
            raise ValueError("remove the extra comma")
    if not isinstance(value, list) or (not any_length and len(value) != len(declared)):
        count = "" if any_length else f"{len(declared)} "
        raise ValueError(f"give {count}values separated by commas" + (", or none" if any_length else ""))
    return tuple(parse(item, declared[0]) for item in value)
