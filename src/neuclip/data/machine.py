"""What this machine has: a folder for what can be made again, and processor cores."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """NEUCLIP_CACHE, else XDG_CACHE_HOME/neuclip, else ~/.cache/neuclip."""
    if chosen := os.environ.get("NEUCLIP_CACHE"):
        return Path(chosen)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "neuclip"
    return Path.home() / ".cache" / "neuclip"


def available_cores() -> int:
    """Those that this process may use, which in a container or a job may be fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
