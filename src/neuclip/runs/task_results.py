"""The file of a model's results: one JSON line per task, which DataComp's own aggregation reads."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuclip.errors import UserError
from neuclip.records import RunFolder, append_line, read_lines, strict, write_text_safely
from neuclip.tasks import Task

FOLDER = "evaluations"  # in the working folder, for models that are no runs
DEPENDS_ON = ("weights", "precision", "data", "switches")  # fields of "meta"; where all are equal, so is the result


def results_file(target: str) -> Path:
    """Of a run tasks.jsonl in its folder; of anything else a file named after it."""
    folder = RunFolder(target)
    if folder.settings.is_file():
        return folder.tasks
    name = re.sub(r"[^\w.]+", "-", target).strip("-.")
    return Path(FOLDER) / f"{name}.jsonl"


@dataclass(frozen=True)
class TaskFile:
    """The results of one model: what is there of other weights is set aside, or an average would mix two models."""

    path: Path
    weights: str

    def read(self) -> list[dict[str, Any]]:
        try:
            lines = read_lines(self.path)
            return [line for line in lines if line["meta"]["weights"] and line["key"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path} is not a file of results; give another --output") from error

    def set_others_aside(self) -> None:
        others = {line["meta"]["weights"] for line in self.read()} - {self.weights}
        if others:
            aside = self.path.with_name(f"{self.path.stem}-{min(others)[:8]}{self.path.suffix}")
            self.path.replace(aside)
            print(f"{self.path} has results of other weights; they are now in {aside}", file=sys.stderr)

    def known(self, facts: Mapping[Task, Mapping[str, Any]]) -> set[str]:
        """Keys of the tasks whose results are there and depend on the same facts."""
        stored = {line["key"]: line["meta"] for line in self.read()}
        return {
            task.key
            for task, wanted in facts.items()
            if task.key in stored and all(stored[task.key].get(name) == wanted[name] for name in DEPENDS_ON)
        }

    def write(self, line: Mapping[str, Any]) -> None:
        """In place of an earlier line of the task, if there is one: the file has each task once."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = self.read()
        others = [other for other in before if other["key"] != line["key"]]
        if len(others) == len(before):
            append_line(self.path, line)
        else:
            write_text_safely(self.path, "".join(json.dumps(strict(one)) + "\n" for one in [*others, line]))
