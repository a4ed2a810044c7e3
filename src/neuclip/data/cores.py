"""How many processor cores there are for this process."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Those that this process may use, which in a container or a job may be fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
