"""The data of DataComp's tasks, each in the layout of its kind."""

from __future__ import annotations

from pathlib import Path

from neuclip.data.held_out import open_retrieval
from neuclip.data.puzzles import Puzzles, read_puzzles
from neuclip.data.source import Source
from neuclip.data.zero_shot import ZeroShotTask
from neuclip.settings.sections import Settings
from neuclip.tasks import Task

TaskData = ZeroShotTask | Source | Puzzles  # to classify, to retrieve from, to solve


def open_task(task: Task, folder: Path) -> TaskData:
    """Raises UserError where a part is missing or broken. Retrieval sets are read with default settings: those of a run
    are about its own data."""
    if task.kind == "classification":
        return ZeroShotTask.open(folder, name=task.name)
    return read_puzzles(folder) if task.kind == "puzzles" else open_retrieval(str(folder), Settings())


def count_images(data: TaskData) -> int:
    return len(data) if isinstance(data, Source) else len(data.source)
