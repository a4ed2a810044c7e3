"""Data sets by name: the one place where data/ knows of neuclip.datasets."""

from __future__ import annotations

from neuclip.datasets.prepared import dataset_names as names
from neuclip.datasets.prepared import held_out, is_labelled, resolve, unprepared
from neuclip.datasets.prepared import is_dataset_name as is_name

__all__ = ["held_out", "is_labelled", "is_name", "names", "resolve", "unprepared"]
