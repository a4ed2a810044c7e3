"""A Hugging Face data set as `save_to_disk` leaves it: Arrow files beside a state.json.

The files are read with pyarrow alone: memory-mapped, any row at once, and without the `datasets` library's own needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuclip.data.tables.arrow import ArrowPairs, holds_bytes, pyarrow_for
from neuclip.data.tables.columns import Asked, Columns, choose_columns
from neuclip.errors import UserError
from neuclip.progress import track

STATE, SPLITS = "state.json", "dataset_dict.json"


def is_saved_dataset(folder: Path) -> bool:
    return (folder / SPLITS).is_file() or ((folder / STATE).is_file() and (folder / "dataset_info.json").is_file())


def open_saved_dataset(name: str, folder: Path, asked: Asked) -> ArrowPairs:
    """Ids are row numbers. A folder of splits is refused: test data must not slip into training."""
    if (folder / SPLITS).is_file():
        splits = [str(split) for split in _json(folder / SPLITS).get("splits", [])]
        if not splits:
            raise UserError(f"{folder / SPLITS}: names no splits; save the set again with save_to_disk")
        chosen = folder / ("train" if "train" in splits else splits[0])
        raise UserError(f"{folder}: holds the parts {', '.join(splits)}; give one of them, such as {chosen}")
    pyarrow_for(folder)
    files = [folder / str(file["filename"]) for file in _json(folder / STATE).get("_data_files", [])]
    outside = [file for file in files if file.parent != folder]
    if outside:
        raise UserError(f"{folder / STATE}: names a file outside of its folder ({outside[0]}); save the set again")
    if not files:
        raise UserError(f"{folder / STATE}: names no data files; save the set again with save_to_disk")
    schema = _table(files[0]).schema
    columns = choose_columns(folder, schema.names, asked)
    holds_bytes(folder, schema, columns)
    return SavedDataset(name, folder, files, columns)


class SavedDataset(ArrowPairs):
    """A block is one file: memory-mapped, so that only what is touched is read, and all may stay open."""

    cache_bytes = math.inf

    def __init__(self, name: str, folder: Path, files: list[Path], columns: Columns):
        self.files = files
        rows = [_table(file).num_rows for file in track(files, "opening", len(files), "files")]
        super().__init__(name, folder, rows, columns)

    def read_block(self, number: int, columns: Sequence[str]) -> Any:
        return _table(self.files[number]).select(list(columns))

    def block_name(self, number: int) -> str:
        return str(self.files[number])


def _table(file: Path) -> Any:
    pyarrow = pyarrow_for(file)
    try:
        with pyarrow.memory_map(str(file)) as mapped:
            return pyarrow.ipc.open_stream(mapped).read_all()
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file}: is not a readable Arrow file ({reason}); save the set again") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); save the set again with save_to_disk") from error
