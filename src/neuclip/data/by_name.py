"""Data sets by name: the one place where data/ knows of neuclip.datasets."""

from __future__ import annotations

from neuclip.datasets.catalogue import HeldOut, held_out, is_labelled, is_name, names, resolve, unprepared

__all__ = ["HeldOut", "held_out", "is_labelled", "is_name", "names", "resolve", "unprepared"]
