"""Where neuclip keeps what it can make again."""

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
