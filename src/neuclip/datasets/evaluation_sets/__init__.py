"""DataComp's evaluation sets in their local layouts, for `neuclip data get`: from the Hugging Face hub or this disk."""

from __future__ import annotations

from pathlib import Path

from neuclip.files import cache_folder


def default_root() -> Path:
    """Where sets go, and are looked for, when no root is given."""
    return cache_folder() / "evaluation-sets"
