"""What BUILD.json says of every built set, so that two builds can be compared."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable

from neuclip.data.named.icons.rasteriser import RASTERISER


def ids_digest(ids: Iterable[str]) -> str:
    """sha256 of the sorted ids, joined by newlines."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()


def drawing_versions() -> dict[str, str]:
    """Versions of the packages whose code decides about pixels."""
    return {name: importlib.metadata.version(name) for name in (RASTERISER, "pillow", "numpy")}
