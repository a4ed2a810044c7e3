"""How an option is stated: once, as a dataclass field with its default, its help and its limits.

Constructors, `help()`, editors, YAML, flags and `--help` all read it from there.
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
    """What is wrong with the options `names` of a section."""

    def __init__(self, message: str, *names: str):
        super().__init__(message)
        self.names = names


def option(default: Any = MISSING, help: str = "", *, may_change: bool = False, **limits: float) -> Any:
    """A field with its one-line help and its limits: `option(1024, "pairs per step", at_least=1)`.

    Limits are `at_least`, `above`, `at_most` and `below`; every number of a tuple keeps them. `may_change`: a run may
    continue with another value, because it says where or how the run computes, and not what.
    """
    return field(default=default, metadata={"help": help, "limits": limits, "may_change": may_change})


@dataclass(frozen=True, kw_only=True)
class Section:
    """Options that are checked when they are given. `prefix` is how errors call them: 'train.'. Where `may_change` is
    true, a run may continue with other values of all of them."""

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
    """Refuse a value that is not of its declared type or outside its limits: a ValueError with the remedy alone."""
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
        for one in value:
            check_value(one, kinds[0], limits)
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
    """The choices of `Literal[...]`; of any other type none."""
    return get_args(declared) if get_origin(declared) is Literal else ()


def parse_choice(value: Any, choices: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    near = nearest(str(value), choices)
    raise ValueError(f"choose {any_of(choices)}" + (f" (did you mean {near}?)" if near else ""))
