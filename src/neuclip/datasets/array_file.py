"""Finished pieces of a build, kept so that a killed build goes on: npz files that hold arrays and nothing to run."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np


def write_arrays(file: Path, **arrays: np.ndarray) -> None:
    """Written beside, brought to the disk and moved into place: neither a kill nor a power cut leaves half of it."""
    partial = file.with_suffix(".partial")
    with partial.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)


def read_array(file: Path, name: str) -> np.ndarray:
    """One array of the file. Nothing is unpickled: others may be able to write into the cache folder."""
    with np.load(file, allow_pickle=False) as stored:
        array: np.ndarray = stored[name]
    return array


def is_whole(file: Path) -> bool:
    """Whether the file is there and its checksums hold; a damaged piece is made again."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
