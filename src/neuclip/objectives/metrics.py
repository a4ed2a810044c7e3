"""What an objective measured in its last call: kept as tensors, turned into floats only when somebody asks."""

from __future__ import annotations

from torch import Tensor


class Metrics:
    """Tensors noted in the hot path without waiting for the device; `as_floats()` waits, once."""

    def __init__(self) -> None:
        self._noted: dict[str, Tensor | None] = {}

    def clear(self) -> None:
        self._noted = {}

    def note(self, **values: Tensor | None) -> None:
        self._noted.update({name: None if value is None else value.detach() for name, value in values.items()})

    def as_floats(self) -> dict[str, float | None]:
        return {name: None if value is None else float(value) for name, value in self._noted.items()}
