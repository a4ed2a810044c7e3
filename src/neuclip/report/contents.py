"""Reads the files of a run into flat values: `run.settings["train.batch_size"]`, `run.number("seconds")`."""

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

Figures = dict[str, float]  # flat keys, finite numbers only: `get` returns a number or None
REMEDY = "move it away to make the page without it"
BEYOND_MEASUREMENT = 1e100  # larger numbers are not measurements


@dataclass(frozen=True)
class RunContents:
    """The contents of a run's files as plain values; a missing file is an empty value."""

    folder: RunFolder
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    records: list[Figures] = field(default_factory=list)
    evaluations: list[Figures] = field(default_factory=list)  # oldest first; each with its "samples"
    merges: list[Figures] = field(default_factory=list)  # from `neuclip merge --curve`; each with its "weight"
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
        """The evaluation before the first step (evaluation.at_start); empty as long as there is no later one."""
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
        """The calibration in the summary; for an unfinished run the same median over the records so far."""
        final = self.number("calibration")
        return late_median(self.records, "calibration") if final is None else final

    @property
    def started(self) -> str:
        """'17 November 2026, 19:46 UTC', the same on every machine."""
        try:
            time = datetime.fromisoformat(str(self.environment.get("started"))).astimezone(UTC)
        except ValueError:
            return ""
        return f"{time.day} {time:%B %Y, %H:%M} UTC"

    def number(self, key: str) -> float | None:
        """A number in the summary; None if it is missing."""
        return finite(self.summary).get(key)

    def last(self, key: str) -> float | None:
        """The value in the newest record that has this key; None if no record has it."""
        return next((record[key] for record in reversed(self.records) if key in record), None)

    def under(self, prefix: str) -> dict[str, Any]:
        """The part of the summary below `prefix`: `run.under("skipped")` is {"image does not decode": 3}."""
        start = f"{prefix}."
        return {key.removeprefix(start): value for key, value in self.summary.items() if key.startswith(start)}


def read_contents(folder: RunFolder) -> RunContents:
    """Read all files of a run. Raises UserError if the folder is not a run, or if a file cannot be read."""
    if not folder.path.is_dir():
        raise UserError(f"{folder.path} is not a folder; give the folder of a run, such as runs/NAME")
    if not any(path.is_file() for path in (folder.settings, folder.records, folder.summary)):
        raise UserError(
            f"{folder.path} is not a run: it has no settings.yaml, records.jsonl or summary.json; "
            "give the folder that `neuclip train` wrote"
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
    """All settings, flat. Raises UserError for settings that this version does not have."""
    if not path.is_file():
        return {}
    with files.reading(path, REMEDY):
        text = files.read_regular(path).decode()
        return flatten(settings_as_dict(build_settings(parse_recipe(text, str(path)))))


def read_json(path: Path) -> dict[str, Any]:
    with files.reading(path, REMEDY):
        return as_mapping(json.loads(files.read_regular(path))) if path.is_file() else {}


def read_figures(path: Path, position: str) -> list[Figures]:
    """The numbers of each line that has the key `position`, where a chart draws it."""
    return [line for line in map(finite, read_lines(path)) if position in line]


def as_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted names, and remove passwords and signatures from URLs.

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
    """The finite numbers of a mapping, without nulls, texts, booleans, NaN and numbers of 1e100 and more."""
    return {key: float(x) for key, x in values.items() if type(x) in (int, float) and abs(x) < BEYOND_MEASUREMENT}


def late_median(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The median over the last quarter of the records. A single record may be far off, for example because a batch has
    two equal captions."""
    late = [finite(record) for record in records[-max(1, len(records) // 4) :]]
    values = [record[key] for record in late if key in record]
    return median(values) if values else None
