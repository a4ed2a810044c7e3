"""The data of DataComp's tasks, each in the layout of its kind."""

from __future__ import annotations

from pathlib import Path

from neuclip.data.clip_benchmark_layout import DATASET_TYPE, RETRIEVAL, is_retrieval_set
from neuclip.data.held_out import open_retrieval
from neuclip.data.puzzles import Puzzles, read_puzzles
from neuclip.data.source import Source
from neuclip.data.tables.folder import find_captions_file
from neuclip.data.zero_shot import ZeroShotTask
from neuclip.errors import UserError
from neuclip.settings.sections import Settings
from neuclip.tasks import Task

TaskData = ZeroShotTask | Source | Puzzles  # to classify, to retrieve from, to solve

TABLES = (".json", ".csv", ".tsv", ".jsonl", ".parquet")


def open_task(task: Task, folder: Path) -> TaskData:
    """Raises UserError where a part is missing or broken. Retrieval sets are read with default settings: those of a run
    are about its own data."""
    if task.kind == "classification":
        return ZeroShotTask.open(folder, name=task.name)
    if task.kind == "puzzles":
        return read_puzzles(folder)
    return open_retrieval(str(_shards_or_table(folder)), Settings())


def has_shards(folder: Path) -> bool:
    return (folder / "test").is_dir() and any((folder / "test").glob("*.tar"))


def _shards_or_table(folder: Path) -> Path:
    """The folder itself if it has shards or captions.csv; else its only table, such as Karpathy's beside the images.
    Shards must be marked: every line of a text would be one caption together with the next."""
    if has_shards(folder):
        if not is_retrieval_set(folder):
            raise UserError(f"{folder / DATASET_TYPE}: does not say {RETRIEVAL}; write this word into it")
        return folder
    if not folder.is_dir() or find_captions_file(folder):
        return folder
    tables = [file for file in folder.iterdir() if file.suffix.lower() in TABLES]
    return tables[0] if len(tables) == 1 else folder


def source_of(data: TaskData) -> Source:
    """Its images."""
    return data if isinstance(data, Source) else data.source
