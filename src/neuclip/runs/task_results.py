"""The file of a model's results: one JSON line per task, which DataComp's own aggregation reads."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuclip.errors import UserError
from neuclip.files import write_text
from neuclip.records import RunFolder, read_lines, strict
from neuclip.runs.provenance import json_sha256
from neuclip.tasks import Task

FOLDER = "evaluations"  # in the working folder, for models that are no runs
# Fields of "meta". Where all are equal, so is the result.
OF_MODEL = ("weights", "model", "precision")
DEPENDS_ON = (*OF_MODEL, "data", "switches")

Line = Mapping[str, Any]


def results_file(target: str) -> Path:
    """Of a run tasks.jsonl in its folder; of anything else a file named after it."""
    folder = RunFolder(target)
    if folder.settings.is_file():
        return folder.tasks
    name = re.sub(r"[^\w.]+", "-", target).strip("-.")
    return Path(FOLDER) / f"{name}.jsonl"


def refuse_unwritable(path: Path) -> None:
    """Before anything is measured."""
    if path.is_dir():
        raise UserError(f"--output {path}: is a folder; give a file, such as {path / 'results.jsonl'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {path}: its folder cannot be made ({error.strerror}); give another file") from error


@dataclass(frozen=True)
class TaskFile:
    """The results of one model: those of others are set aside, or an average would mix two models."""

    path: Path
    model: Mapping[str, str]  # OF_MODEL

    def read(self) -> list[dict[str, Any]]:
        return _read(self.path)

    def set_others_aside(self) -> None:
        """Into a file beside this one for each other model; what was set aside of this model comes back."""
        lines, aside = self.read(), self._aside(self.model)
        others = [line for line in lines if _model_of(line) != self.model]
        back = _read(aside) if aside.is_file() else []
        for line in others:
            place = self._aside(_model_of(line))
            _write(place, _replace(_read(place), line))
        if others:
            places = sorted({str(self._aside(_model_of(line))) for line in others})
            print(f"{self.path} has results of other weights; they are now in {', '.join(places)}", file=sys.stderr)
        if others or back:
            for line in (line for line in lines if line not in others):
                back = _replace(back, line)
            _write(self.path, back)
            aside.unlink(missing_ok=True)

    def known(self, facts: Mapping[Task, Mapping[str, Any]]) -> set[str]:
        """Keys of the tasks whose results are there and depend on the same facts."""
        stored = {line["key"]: line["meta"] for line in self.read()}
        return {
            task.key
            for task, wanted in facts.items()
            if task.key in stored and all(stored[task.key].get(name) == wanted[name] for name in DEPENDS_ON)
        }

    def write(self, line: Line) -> None:
        """In place of an earlier line of the task, if there is one: the file has each task once."""
        _write(self.path, _replace(self.read(), line))

    def _aside(self, model: Mapping[str, str]) -> Path:
        return self.path.with_name(f"{self.path.stem}-{json_sha256(model)[:8]}{self.path.suffix}")


def _model_of(line: Line) -> dict[str, str]:
    return {name: line["meta"].get(name, "") for name in OF_MODEL}


def _replace(lines: Iterable[dict[str, Any]], line: Line) -> list[dict[str, Any]]:
    return [*(other for other in lines if other["key"] != line["key"]), dict(line)]


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return [line for line in read_lines(path) if line["meta"]["weights"] and line["key"] and line["metrics"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of results; give another --output") from error


def _write(path: Path, lines: Iterable[Line]) -> None:
    """The whole file: what is appended to a line that a kill cut off would be lost with it."""
    write_text(path, "".join(json.dumps(strict(one), allow_nan=False) + "\n" for one in lines))
