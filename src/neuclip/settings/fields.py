"""How a settings field is declared and checked: a default, its help text, and a range with a remedy."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

from neuclip.errors import UserError


def described(default: Any, help: str) -> Any:
    """A dataclass field with its one-line help: `batch_size: int = described(1024, "pairs per step")`."""
    return field(default=default, metadata={"help": help})


def check_at_least(name: str, value: float, minimum: float, remedy: str) -> None:
    if not (math.isfinite(value) and value >= minimum):
        raise UserError(f"{name} is {value}; give {minimum} or more ({remedy})")


def check_positive(name: str, value: float, remedy: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} is {value}; give a number above 0 ({remedy})")
