"""The files of a run, read once, as flat values: `run.settings["train.batch_size"]`, `run.number("seconds")`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from neuclip import files
from neuclip.errors import UserError
from neuclip.records import RunFolder, read_lines
from neuclip.secrets import without_queries
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.reading import build_settings, parse_recipe
from neuclip.settings.writing import settings_as_dict

Figures = dict[str, float]  # flat keys, finite numbers only: `get` answers a number or None
REMEDY = "move it away, and the page is made without it"
BEYOND_MEASUREMENT = 1e100


@dataclass(frozen=True)
class RunContents:
    """One run as plain values; an absent file is an empty value."""

    folder: RunFolder
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    records: list[Figures] = field(default_factory=list)
    evaluations: list[Figures] = field(default_factory=list)  # oldest first; each with its "samples"
    merges: list[Figures] = field(default_factory=list)  # of `neuclip merge --curve`; each with its "weight"
    gallery: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.settings.get("run.name") or self.folder.path.resolve().name)

    @property
    def objective(self) -> str:
        """The method as its authors write it; '' without settings."""
        name = self.settings.get("objective.name")
        return OBJECTIVES[name].title if name in OBJECTIVES else ""

    @property
    def final(self) -> Figures:
        """The newest evaluation."""
        return self.evaluations[-1] if self.evaluations else {}

    @property
    def before(self) -> Figures:
        """What evaluation.at_start measured before the first step; empty before there is more to compare it with."""
        return self.evaluations[0] if len(self.evaluations) > 1 and self.evaluations[0]["samples"] == 0 else {}

    @property
    def samples_seen(self) -> float:
        """The largest count in any of the files."""
        lines = (*self.records[-1:], *self.evaluations[-1:])
        return max([self.number("samples_seen") or 0.0, *(line.get("samples", 0.0) for line in lines)])

    @property
    def samples_planned(self) -> float:
        """`train.samples` rounded down to whole batches; 0 without settings."""
        budget, batch_size = (self.settings.get(f"train.{name}", 0) for name in ("samples", "batch_size"))
        return budget // batch_size * batch_size if batch_size else 0

    @property
    def finished(self) -> bool:
        return bool(self.summary) and self.samples_seen >= self.samples_planned

    @property
    def calibration(self) -> float | None:
        """That of the summary; while the run goes on, what the summary would say now."""
        final = self.number("calibration")
        return late_median(self.records, "calibration") if final is None else final

    @property
    def started(self) -> str:
        """'17 November 2026, 19:46 UTC': whenever the page is made, it is the same."""
        try:
            time = datetime.fromisoformat(str(self.environment.get("started"))).astimezone(UTC)
        except ValueError:
            return ""
        return f"{time.day} {time:%B %Y, %H:%M} UTC"

    def number(self, key: str) -> float | None:
        """A figure of the summary; None where there is none."""
        return finite(self.summary).get(key)

    def last(self, key: str) -> float | None:
        """Of the newest record that has it."""
        return next((record[key] for record in reversed(self.records) if key in record), None)

    def under(self, prefix: str) -> dict[str, Any]:
        """The part of the summary below `prefix`: `run.under("skipped")` is {"image does not decode": 3}."""
        start = f"{prefix}."
        return {key.removeprefix(start): value for key, value in self.summary.items() if key.startswith(start)}


def read_contents(folder: RunFolder) -> RunContents:
    """UserError for a folder that no run wrote to, and for a file that cannot be read."""
    if not folder.path.is_dir():
        raise UserError(f"{folder.path} is not a folder; give the folder of a run, such as runs/NAME")
    if not any(path.is_file() for path in (folder.settings, folder.records, folder.summary)):
        raise UserError(
            f"{folder.path} is not a run: it has no settings.yaml, records.jsonl or summary.json; "
            "give the folder that `neuclip train` made"
        )
    return RunContents(
        folder,
        settings=read_settings(folder.settings),
        environment=flatten(read_json(folder.environment)),
        summary=flatten(read_json(folder.summary)),
        records=read_figures(folder.records, "samples"),
        evaluations=read_figures(folder.evaluation, "samples"),
        merges=read_figures(folder.merges, "weight"),
        gallery=read_json(folder.gallery),
    )


def read_settings(path: Path) -> dict[str, Any]:
    """All settings, flat. What no run of this version can have is a UserError."""
    if not path.is_file():
        return {}
    with files.reading(path, REMEDY):
        text = files.read_regular(path).decode()
        return flatten(settings_as_dict(build_settings(parse_recipe(text, str(path)))))


def read_json(path: Path) -> dict[str, Any]:
    with files.reading(path, REMEDY):
        return as_mapping(json.loads(files.read_regular(path))) if path.is_file() else {}


def read_figures(path: Path, place: str) -> list[Figures]:
    """The lines that have a `place`, which a chart draws them at."""
    return [line for line in map(finite, read_lines(path)) if place in line]


def as_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names; addresses without their passwords and signatures.

    >>> flatten({"data": {"count": 3, "train": "s3://a/b.tar?secret"}})
    {'data.count': 3, 'data.train': 's3://a/b.tar'}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = without_secrets(value)
    return flat


def without_secrets(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [without_secrets(one) for one in value]
    return without_queries(value) if isinstance(value, str) else value


def finite(values: Mapping[str, Any]) -> Figures:
    """Its numbers: what is null, text, true, NaN or beyond any measurement is left out."""
    return {key: float(x) for key, x in values.items() if type(x) in (int, float) and abs(x) < BEYOND_MEASUREMENT}


def late_median(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Of the last quarter of the records: a rare equal caption in a batch sends a single record far off."""
    found = [finite(record) for record in records[-max(1, len(records) // 4) :]]
    values = [record[key] for record in found if key in record]
    return median(values) if values else None
