"""The run folder and its JSON lines: the only files that reports and comparisons read. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from neuclip import files

HELD_OUT = "held_out"  # in a line of skipped.jsonl: the held-out set it is of; those of the training data have none


class RunFolder:
    """Paths of one run. `RunFolder("runs/x").records` is runs/x/records.jsonl, whether it exists or not."""

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

    @property
    def is_taken(self) -> bool:
        """Whether a new run cannot have this folder; an empty one it can."""
        path = self.path
        return path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir())))


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one strict JSON object and hand it to the system, so that a killed run keeps every finished line."""
    append_lines(path, [record])


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(strict(record), allow_nan=False) + "\n" for record in records)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All records of a file, oldest first; a last line cut off by a kill is left out. No file: no records."""
    return [json.loads(line) for line in _whole_lines(path)]


def _whole_lines(path: Path) -> list[bytes]:
    return files.read_regular(path).split(b"\n")[:-1] if path.exists() else []


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Cut off the records that are not to be kept, and lines that are no records: not JSON, or without the fields that
    `keep` looks at. How many of the latter there were."""
    kept, broken = [], 0
    for line in _whole_lines(path):
        try:
            record = json.loads(line)
            kept += [record] if keep(record) else []
        except (ValueError, RecursionError, KeyError, TypeError):
            broken += 1
    if path.exists():
        files.write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
    return broken


def write_json(path: Path, value: Any) -> None:
    files.write_json(path, strict(value))


def strict(value: Any) -> Any:
    """Strict JSON has no NaN or infinity: such a number becomes null, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value
