"""How a settings field is declared and checked: a default, its help text, its choices or range, and a remedy."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from neuclip.errors import UserError
from neuclip.settings.values import parse_choice


def described(default: Any, help: str) -> Any:
    """A dataclass field with its one-line help: `batch_size: int = described(1024, "pairs per step")`."""
    return field(default=default, metadata={"help": help})


def check_at_least(name: str, value: float, minimum: float, remedy: str) -> None:
    if not (math.isfinite(value) and value >= minimum):
        raise UserError(f"{name} is {value}; give {minimum} or more ({remedy})")


def check_positive(name: str, value: float, remedy: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} is {value}; give a number above 0 ({remedy})")


def check_choices(settings: Any, section: str) -> None:
    """Every field that is declared as `Literal[...]`, or as that or None, holds one of its choices."""
    for name, declared in get_type_hints(type(settings)).items():
        if choices := choices_of(declared):
            value = getattr(settings, name)
            try:
                if value is not None or type(None) not in get_args(declared):
                    parse_choice(value, choices)
            except ValueError as error:
                raise UserError(f"{section}.{name} is {value!r}; {error}") from None


def choices_of(declared: Any) -> tuple[str, ...]:
    """The choices of `Literal[...]` or `Literal[...] | None`; of any other type none.

    >>> choices_of(Literal["adam", "sgd"] | None), choices_of(int)
    (('adam', 'sgd'), ())
    """
    literals = [kind for kind in (declared, *get_args(declared)) if get_origin(kind) is Literal]
    return get_args(literals[0]) if literals else ()
