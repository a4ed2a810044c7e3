"""What an examination found: figures under flat keys, warnings, and problems that training would fail of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Advice(NamedTuple):
    """One line for a person."""

    what: str
    why: str  # why it matters
    remedy: str  # what to change, with its flag

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; {self.remedy}"


@dataclass
class Findings:
    """Keys are `section.figure` and stable: programs read them with `neuclip doctor --json`.

    >>> findings = Findings()
    >>> findings.note("plan", steps=750)
    >>> findings["plan.steps"]
    750
    """

    figures: dict[str, Any] = field(default_factory=dict)
    warnings: list[Advice] = field(default_factory=list)
    problems: list[Advice] = field(default_factory=list)

    def note(self, section: str, **figures: Any) -> None:
        self.figures.update({f"{section}.{name}": value for name, value in figures.items()})

    def __getitem__(self, key: str) -> Any:
        return self.figures[key]

    def warn(self, what: str, why: str, remedy: str) -> None:
        self.warnings.append(Advice(what, why, remedy))

    def fail(self, what: str, why: str, remedy: str) -> None:
        """Training would not start, or would stop."""
        self.problems.append(Advice(what, why, remedy))

    @property
    def ready(self) -> bool:
        return not self.problems

    def as_plain(self) -> dict[str, Any]:
        advice = {"problems": self.problems, "warnings": self.warnings}
        return {
            "ready": self.ready,
            **{name: [one._asdict() for one in some] for name, some in advice.items()},
            **self.figures,
        }
