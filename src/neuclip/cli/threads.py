"""How CPU threads wait for work. Set before torch is imported, because its thread library reads it once."""

from __future__ import annotations

import os

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # any of them is the user's own choice


def let_threads_sleep() -> None:
    """Waiting OpenMP threads spin by default. Beside other busy processes they take the cores from threads that have
    work: one of three runs on two cores trained at 30 to 40 samples/s, and at 270 with threads that sleep."""
    if not any(name in os.environ for name in VARIABLES):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
