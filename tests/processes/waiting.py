"""What the ranks of test_waiting.py run: `-m tests.processes.waiting WHAT`, with short limits."""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta

import torch

from neuclip.distributed import collectives, connection
from neuclip.distributed.collectives import any_rank, rank
from neuclip.distributed.error_sync import on_main_rank, process_group
from neuclip.errors import RunFailed

LIMIT = 15.0


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def work_longer_than_the_limit() -> None:
    threading.Event().wait(1.3 * LIMIT)


def wait_for_another(what: str) -> None:
    if what == "step" and rank() == 1:
        stop_this_process()
    if what == "step":
        any_rank(False)
    if what == "main":
        on_main_rank(stop_this_process)
    if what == "long":
        on_main_rank(work_longer_than_the_limit)


if __name__ == "__main__":
    collectives.STEP_TIMEOUT = timedelta(seconds=LIMIT)
    connection.START_SECONDS = 1.0 if sys.argv[1] == "start" else 300.0
    connection.SILENT_SECONDS, connection.BEAT_SECONDS = 0.5, 0.2
    try:
        with process_group(torch.device("cpu")):
            wait_for_another(sys.argv[1])
        print("done")
    except RunFailed as failure:
        print(failure)
