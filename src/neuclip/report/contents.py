"""Everything the page is made of, read once from a run's folder. What is missing or damaged is noted, never fatal."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from neuclip.errors import UserError
from neuclip.records import HELD_OUT, RunFolder, read_lines
from neuclip.settings.objectives import OBJECTIVES


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
    skipped: dict[str, Counter[str]]  # by reason: of the training data under "", of held-out sets under their names
    unreadable: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.setting("run", "name") or self.folder.path.resolve().name)

    @property
    def objective(self) -> str:
        name = str(self.setting("objective", "name") or "")
        return OBJECTIVES[name].title if name in OBJECTIVES else name

    @property
    def predicts_normalizers(self) -> bool:
        name = str(self.setting("objective", "name") or "")
        return name not in OBJECTIVES or OBJECTIVES[name].predicts_normalizers

    @property
    def batch_size(self) -> int | None:
        size = number(self.setting("train", "batch_size"))
        return None if size is None else int(size)

    @property
    def samples_seen(self) -> float:
        """The furthest point that any file tells of."""
        lines = [*self.records[-1:], *self.evaluations[-1:], {"samples": self.summary.get("samples_seen")}]
        return max(number(line.get("samples")) or 0.0 for line in lines)

    @property
    def samples_planned(self) -> float | None:
        """Only whole batches are taken, so a finished run may stop just short of `train.samples`."""
        budget = number(self.setting("train", "samples"))
        if budget is None or not self.batch_size:
            return budget
        return budget // self.batch_size * self.batch_size

    @property
    def finished(self) -> bool:
        planned = self.samples_planned
        return bool(self.summary) and (planned is None or self.samples_seen >= planned)

    @property
    def last_written(self) -> datetime | None:
        """When the run last wrote something, in UTC."""
        folder = self.folder
        times = [modified(path) for path in (folder.records, folder.evaluation, folder.summary, folder.settings)]
        known = [time for time in times if time is not None]
        return datetime.fromtimestamp(max(known), tz=UTC) if known else None

    def setting(self, section: str, name: str) -> Any:
        fields = self.settings.get(section)
        return fields.get(name) if isinstance(fields, dict) else None


def read_contents(folder: RunFolder) -> RunContents:
    """Read what there is. A folder in which no run ever wrote is a mistake of the person who asks."""
    if not folder.path.is_dir():
        raise UserError(f"{folder.path} is not a folder; give the folder of a run, such as runs/NAME")
    if not any(path.is_file() for path in (folder.settings, folder.records, folder.summary)):
        raise UserError(
            f"{folder.path} is not a run: it has no settings.yaml, records.jsonl or summary.json; "
            "give the folder that `neuclip train` made"
        )
    unreadable: list[str] = []

    def read(path: Path, reader: Callable[[Path], Any], wanted: type) -> Any:
        if not path.is_file():
            return wanted()
        try:
            value = reader(path)
        except (OSError, ValueError, RecursionError, yaml.YAMLError):  # UnicodeDecodeError and JSON's are ValueErrors
            value = None
        if not isinstance(value, wanted):
            unreadable.append(path.name)
            return wanted()
        return value

    return RunContents(
        folder=folder,
        settings=read(folder.settings, read_yaml, dict),
        records=only_objects(read(folder.records, read_lines, list)),
        evaluations=only_objects(read(folder.evaluation, read_lines, list)),
        summary=read(folder.summary, read_json, dict),
        environment=read(folder.environment, read_json, dict),
        gallery=read(folder.gallery, read_json, dict),
        skipped=count_skipped(only_objects(read(folder.skipped, read_lines, list))),
        unreadable=unreadable,
    )


def count_skipped(records: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for record in records:
        times = record.get("times", 1)  # a line may stand for several
        reasons = counts.setdefault(str(record.get(HELD_OUT, "")), Counter())
        reasons[str(record.get("reason", "no reason given"))] += times if isinstance(times, int) else 1
    return counts


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def only_objects(values: list[Any]) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)]


def number(value: Any) -> float | None:
    """A finite number, or None for null, text, true, NaN and whatever else a file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:  # JSON allows integers that no float holds
        return None
    # Nothing measured lies beyond these; the drawing's arithmetic would overflow there.
    if not math.isfinite(as_float) or abs(as_float) > 1e100:
        return None
    return as_float if abs(as_float) > 1e-100 else 0.0


def section(value: Any) -> dict[str, Any]:
    """`value` if it is a mapping, else an empty one: half-written files must not stop the page."""
    return value if isinstance(value, dict) else {}


def modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
