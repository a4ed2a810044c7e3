"""The run folder and its files of JSON lines, which reports and comparisons read. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from neuclip import files

REMEDY = "bring back a whole copy, or move it away"


class RunFolder:
    """The paths of one run's files, which need not exist: `RunFolder("runs/x").records` is runs/x/records.jsonl."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.settings = self.path / "settings.yaml"
        self.environment = self.path / "environment.json"
        self.records = self.path / "records.jsonl"
        self.evaluation = self.path / "evaluation.jsonl"
        self.tasks = self.path / "tasks.jsonl"
        self.skipped = self.path / "skipped.jsonl"
        self.summary = self.path / "summary.json"
        self.gallery = self.path / "gallery.json"
        self.merges = self.path / "merge.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.report = self.path / "report.html"
        self.lock = self.path / "run.lock"


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one strict JSON object. It is handed to the system at once, so a killed run keeps every finished line."""
    append_lines(path, [record])


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    files.append_text(path, as_lines(records))


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file of records atomically."""
    files.write_text(path, as_lines(records))


def as_lines(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(strict(record), allow_nan=False) + "\n" for record in records)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All records of a file, oldest first; none if the file is missing. A last line that a kill cut off is skipped. Any
    other line that is not a JSON object raises UserError."""
    if not path.exists():
        return []
    with files.reading(path, REMEDY):
        return [_record(number, line) for number, line in enumerate(_complete_lines(path), start=1)]


def _complete_lines(path: Path) -> list[bytes]:
    return files.read_regular(path).split(b"\n")[:-1]


def _record(number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise TypeError(f"line {number} is not a JSON object")
    return record


def keep_up_to(path: Path, samples: int) -> None:
    """Delete the records after this number of samples, and an incomplete last line that a kill left."""
    if path.exists():
        with files.reading(path, REMEDY):
            kept = [record for record in read_lines(path) if record["samples"] <= samples]
        write_lines(path, kept)


def write_json(path: Path, value: Any) -> None:
    files.write_json(path, strict(value))


def strict(value: Any) -> Any:
    """The value with NaN and infinity replaced by None at any depth, because strict JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value
