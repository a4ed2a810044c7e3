"""The result of an examination: figures under flat keys, warnings, and problems that would make training fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple


class Advice(NamedTuple):
    """One line for the user."""

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
    >>> findings["plan.steps"], findings.section("plan").steps
    (750, 750)
    """

    figures: dict[str, Any] = field(default_factory=dict)
    warnings: list[Advice] = field(default_factory=list)
    problems: list[Advice] = field(default_factory=list)

    def note(self, section: str, **figures: Any) -> None:
        self.figures.update({f"{section}.{name}": value for name, value in figures.items()})

    def __getitem__(self, key: str) -> Any:
        return self.figures[key]

    def __contains__(self, key: str) -> bool:
        return key in self.figures

    def section(self, name: str) -> SimpleNamespace:
        """The figures of one section as attributes."""
        pairs = ((key.partition("."), value) for key, value in self.figures.items())
        return SimpleNamespace(**{figure: value for (section, _, figure), value in pairs if section == name})

    def warn(self, what: str, why: str, remedy: str) -> None:
        self.warnings.append(Advice(what, why, remedy))

    def fail(self, what: str, why: str, remedy: str) -> None:
        """Training would not start, or would stop."""
        self.problems.append(Advice(what, why, remedy))

    def fail_with(self, error: Exception, why: str, remedy: str = "give other data") -> None:
        """An error that training would raise; `remedy` is used if its message has none after a semicolon."""
        what, _, own_remedy = str(error).partition("; ")
        self.fail(what, why, own_remedy or remedy)

    @property
    def ready(self) -> bool:
        return not self.problems

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        problems, warnings = ([advice._asdict() for advice in some] for some in (self.problems, self.warnings))
        return {"ready": self.ready, "problems": problems, "warnings": warnings, **self.figures}
