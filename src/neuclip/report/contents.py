"""The files of a run, read once. A missing or damaged file is noted and costs only its own part of the page."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from neuclip.errors import UserError
from neuclip.records import RunFolder, read_lines
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.reading import build_settings, parse_recipe
from neuclip.settings.writing import settings_as_dict


@dataclass(frozen=True)
class RunContents:
    """The files of one run as plain Python values; an absent file is an empty value."""

    folder: RunFolder
    settings: dict[str, Any]
    records: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]
    environment: dict[str, Any]
    gallery: dict[str, Any]
    merges: list[dict[str, Any]]
    skipped: dict[str, Counter[str]]  # by reason: of the training data under "", of held-out sets under their names
    unreadable: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.setting("run", "name") or self.folder.path.resolve().name)

    @property
    def objective(self) -> str:
        """The method as its authors write it; '' without settings."""
        name = self.setting("objective", "name")
        return OBJECTIVES[name].title if name in OBJECTIVES else ""

    @property
    def predicts_normalizers(self) -> bool:
        name = self.setting("objective", "name")
        return name not in OBJECTIVES or OBJECTIVES[name].predicts_normalizers

    @property
    def batch_size(self) -> int | None:
        size = number(self.setting("train", "batch_size"))
        return None if size is None else int(size)

    @property
    def samples_seen(self) -> float:
        """The largest count in any of the files."""
        lines = [*self.records[-1:], *self.evaluations[-1:], {"samples": self.summary.get("samples_seen")}]
        return max(number(line.get("samples")) or 0.0 for line in lines)

    @property
    def samples_planned(self) -> float | None:
        """`train.samples` rounded down to whole batches."""
        budget = number(self.setting("train", "samples"))
        if budget is None or not self.batch_size:
            return budget
        return budget // self.batch_size * self.batch_size

    @property
    def calibration(self) -> float | None:
        """That of the summary; while the run goes on, what the summary would say now."""
        final = number(self.summary.get("calibration"))
        return late_median(self.records, "calibration") if final is None else final

    def last_value(self, key: str) -> float | None:
        """The newest record's value that is not null."""
        values = (number(record.get(key)) for record in reversed(self.records))
        return next((value for value in values if value is not None), None)

    @property
    def normalizer_errors(self) -> tuple[float | None, float | None]:
        """Mean squared error of the method's log-normalizers and of a mini-batch's; None where it was not measured."""
        estimators = as_dict(as_dict(self.summary.get("normalizer_error")).get("estimators"))
        method, batch = (number(as_dict(estimators.get(name)).get("mean")) for name in ("method", "minibatch"))
        return method, batch

    @property
    def truncated_captions(self) -> float | None:
        """Share of captions that fill the context, from the summary or, while the run goes on, the last record."""
        return number((self.summary or (self.records[-1] if self.records else {})).get("truncated_captions"))

    @property
    def finished(self) -> bool:
        planned = self.samples_planned
        return bool(self.summary) and (planned is None or self.samples_seen >= planned)

    @property
    def last_written(self) -> datetime | None:
        """When the run last wrote something, in UTC."""
        folder = self.folder
        paths = (folder.records, folder.evaluation, folder.summary, folder.settings)
        times = [time for path in paths if (time := modification_time(path)) is not None]
        return datetime.fromtimestamp(max(times), tz=UTC) if times else None

    def setting(self, section: str, name: str) -> Any:
        return as_dict(self.settings.get(section)).get(name)


def read_contents(folder: RunFolder) -> RunContents:
    """Read what there is; UserError for a folder that no run wrote to."""
    if not folder.path.is_dir():
        raise UserError(f"{folder.path} is not a folder; give the folder of a run, such as runs/NAME")
    if not any(path.is_file() for path in (folder.settings, folder.records, folder.summary)):
        raise UserError(
            f"{folder.path} is not a run: it has no settings.yaml, records.jsonl or summary.json; "
            "give the folder that `neuclip train` made"
        )
    unreadable: list[str] = []

    def read(path: Path, reader: Callable[[Path], Any], kind: type) -> Any:
        if not path.is_file():
            return kind()
        try:
            value = reader(path)
        except (OSError, ValueError, RecursionError):  # UserError, UnicodeDecodeError and JSON's are ValueErrors
            value = None
        if not isinstance(value, kind):
            unreadable.append(path.name)
            return kind()
        return value

    return RunContents(
        folder=folder,
        settings=read(folder.settings, read_settings_of_run, dict),
        records=dicts_in(read(folder.records, read_lines, list)),
        evaluations=dicts_in(read(folder.evaluation, read_lines, list)),
        summary=read(folder.summary, read_json, dict),
        environment=read(folder.environment, read_json, dict),
        gallery=read(folder.gallery, read_json, dict),
        merges=dicts_in(read(folder.merges, read_lines, list)),
        skipped=count_skipped(dicts_in(read(folder.skipped, read_lines, list))),
        unreadable=unreadable,
    )


def late_median(records: list[dict[str, Any]], key: str) -> float | None:
    """Of the last quarter of the records: a rare equal caption in a batch sends a single record far off."""
    last_quarter = records[-max(1, len(records) // 4) :]
    values = [value for record in last_quarter if (value := number(record.get(key))) is not None]
    return median(values) if values else None


def count_skipped(records: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for record in records:
        times = record.get("times", 1)  # one line may count several samples
        reasons = counts.setdefault("", Counter())
        reasons[str(record.get("reason", "no reason given"))] += times if isinstance(times, int) else 1
    return counts


def read_settings_of_run(path: Path) -> dict[str, dict[str, Any]]:
    """All sections with all settings. What no run of this version can have is a UserError."""
    sections = settings_as_dict(build_settings(parse_recipe(path.read_text(encoding="utf-8"), path.name)))
    return {
        section: {name: "default" if value is None else value for name, value in values.items()}
        for section, values in sections.items()
    }


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def dicts_in(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def number(value: Any) -> float | None:
    """A finite number, or None for null, text, true, NaN and whatever else a file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:  # JSON allows integers that no float holds
        return None
    # No measurement is larger or smaller than this, and drawing such a value would overflow.
    if not math.isfinite(as_float) or abs(as_float) > 1e100:
        return None
    return as_float if abs(as_float) > 1e-100 else 0.0


def as_dict(value: Any) -> dict[str, Any]:
    """`value` if it is a dict, else an empty one: damaged files must not stop the page."""
    return value if isinstance(value, dict) else {}


def modification_time(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:  # absent, or just replaced by the running training
        return None
