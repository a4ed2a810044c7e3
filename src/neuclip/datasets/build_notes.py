"""What BUILD.json says of every built set, so that two builds can be compared."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from neuclip.datasets.icons.rasteriser import RASTERISER


def ids_digest(ids: Iterable[str]) -> str:
    """sha256 of the sorted ids, joined by newlines."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()


def drawing_versions() -> dict[str, str]:
    """Versions of the packages whose code decides about pixels."""
    return {name: importlib.metadata.version(name) for name in (RASTERISER, "pillow", "numpy")}


def parts_with_counts(folder: Path, parts: Sequence[str]) -> dict[str, int | None]:
    """How many pairs or images each part of a built set holds; None where BUILD.json does not say."""
    try:
        built = json.loads((folder / "BUILD.json").read_bytes())
    except (OSError, ValueError):  # removed or spoilt by hand; the set is none the worse for it
        built = {}
    counts = built.get("pairs") or {parts[0]: built.get("images")}
    return {part: counts.get(part) for part in parts}
