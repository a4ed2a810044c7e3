"""Whether a folder holds an evaluation set: its parts are whole, and its counts are those of the task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from neuclip.data.held_out import open_task
from neuclip.data.source import fingerprint
from neuclip.data.task_sets import TEMPLATES, Puzzles, ZeroShotTask
from neuclip.tasks import Task


@dataclass(frozen=True)
class Checked:
    """What a folder holds."""

    counts: dict[str, int]
    notes: tuple[str, ...]  # in what it differs from the task: figures on it are not the task's


def check_set(task: Task, folder: Path) -> Checked:
    """Raises UserError where a part is missing or broken. Counts that are not the task's are noted: a part of a set,
    or another version of it, is useful as long as nobody takes its figures for the task's."""
    opened = open_task(task, folder)
    notes: list[str] = []
    if isinstance(opened, ZeroShotTask):
        counts = {"images": len(opened.source), "classes": len(opened.classnames)}
        expected = {"images": task.size, "classes": task.classes or 0}
        if not (folder / TEMPLATES).is_file():
            notes.append(f"no {TEMPLATES}: prompts are the default ones, not the task's")
        columns = 0 if opened.metadata is None else opened.metadata.shape[1]
        if columns < len(task.metadata):
            notes.append(f"{columns} numbers per image in npy members, the task has {', '.join(task.metadata)}")
    elif isinstance(opened, Puzzles):
        counts = {"images": len(opened.source), "puzzles": len(opened.puzzles)}
        expected = {"puzzles": task.size}
    else:
        counts = {"images": len(opened), "captions": fingerprint(opened)[1].captions}
        expected = {"images": task.size}
    differing = {what: number for what, number in expected.items() if counts[what] != number}
    notes += [f"{counts[what]:,} {what}, the task has {number:,}" for what, number in differing.items()]
    return Checked(counts, tuple(notes))
