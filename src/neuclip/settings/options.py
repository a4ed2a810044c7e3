"""Defines options: each one is stated once, as a dataclass field with its default, help and limits.

Constructors, `help()`, editors, YAML, flags and `--help` all read it from that field.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from neuclip.errors import UserError, any_of, nearest

LIMITS = {
    "at_least": (operator.ge, "{} or more"),
    "above": (operator.gt, "a number above {}"),
    "at_most": (operator.le, "at most {}"),
    "below": (operator.lt, "below {}"),
}
TYPES = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "text"),
}


class OptionError(UserError):
    """The options `names` of a section have wrong values."""

    def __init__(self, message: str, *names: str):
        super().__init__(message)
        self.names = names


def option(default: Any = MISSING, help: str = "", *, may_change: bool = False, **limits: float) -> Any:
    """A dataclass field with its help text and its limits: `option(1024, "pairs per step", at_least=1)`.

    Limits are `at_least`, `above`, `at_most` and `below`; for a tuple they apply to each number. `may_change`: a run
    may be resumed with another value, because the option changes where or how the run computes, but not its result.
    """
    return field(default=default, metadata={"help": help, "limits": limits, "may_change": may_change})


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of options, which are checked when the object is made. Errors put `prefix`, such as 'train.', before an
    option's name. If `may_change` is true, a run may be resumed with other values of all of them."""

    prefix: ClassVar[str] = ""
    may_change: ClassVar[bool] = False

    def __post_init__(self) -> None:
        types: dict[str, Any] = types_of(type(self))  # type: ignore[arg-type]
        for option in fields(self):
            value, declared = getattr(self, option.name), types[option.name]
            try:
                check_value(value, declared, option.metadata.get("limits", {}))
            except ValueError as error:
                known = option.default not in (MISSING, None) and not choices_of(declared)
                hint = f" (default {option.default})" if known else ""
                raise OptionError(f"{self.prefix}{option.name} is {value!r}; {error}{hint}", option.name) from None


def check_value(value: Any, declared: Any, limits: Mapping[str, float]) -> None:
    """Raise ValueError if a value does not have its declared type or is outside its limits. The message is only the
    remedy."""
    if declared is Any:  # an argument in Python that is checked where it is used
        return
    if choices := choices_of(declared):
        parse_choice(value, choices)
    elif get_origin(declared) in (Union, UnionType):  # X | None
        if value is not None:
            check_value(value, get_args(declared)[0], limits)
    elif get_origin(declared) is tuple:
        kinds = get_args(declared)
        if not isinstance(value, tuple) or (Ellipsis not in kinds and len(value) != len(kinds)):
            raise ValueError(f"give a tuple of {'' if Ellipsis in kinds else f'{len(kinds)} '}values")
        for item in value:
            check_value(item, kinds[0], limits)
    else:
        kind, what = TYPES[declared]
        number: Any = value
        wanted = " and ".join(LIMITS[name][1].format(limit) for name, limit in limits.items())
        if not isinstance(value, kind) or (isinstance(value, bool) and declared is not bool):
            raise ValueError(f"give {what}{', ' if wanted else ''}{wanted}")
        if declared is float and not math.isfinite(number):
            raise ValueError(f"give {wanted or what}")
        if not all(LIMITS[name][0](number, limit) for name, limit in limits.items()):
            raise ValueError(f"give {wanted}")


@cache
def types_of(kind: type) -> dict[str, Any]:
    """The declared type of every field."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def choices_of(declared: Any) -> tuple[str, ...]:
    """The choices of `Literal[...]`; () for any other type."""
    return get_args(declared) if get_origin(declared) is Literal else ()


def parse_choice(value: Any, choices: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    near = nearest(str(value), choices)
    raise ValueError(f"choose {any_of(choices)}" + (f" (did you mean {near}?)" if near else ""))
