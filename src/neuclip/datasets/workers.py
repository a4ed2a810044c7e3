"""Drawing in several child processes: chunks of drawings in, drawn chunks out.

Plain child processes, not multiprocessing, which runs the user's script again in every child: a script without a
`__main__` guard would build the set inside the build.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from neuclip.datasets.drawing import Drawable, Drawn, draw_one
from neuclip.errors import RunFailed

MOST_PROCESSES = 8
CHUNK = 64
LENGTH = struct.Struct("<Q")


class Drawers:
    """Child processes that draw, for as long as the `with` block lasts; without a number, one per core.

    >>> with Drawers() as drawers:
    ...     first, second = drawers.draw([svg, another]), drawers.draw(more)        # doctest: +SKIP
    """

    def __init__(self, processes: int | None = None):
        from neuclip.machine import available_cores  # with torch, which the workers themselves do not need

        processes = processes or min(MOST_PROCESSES, available_cores())
        self.workers = [_start_worker() for _ in range(processes)]
        self.threads = ThreadPoolExecutor(len(self.workers))
        self.idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)

    def draw(self, images: Sequence[Drawable]) -> Iterator[Drawn | None]:
        """Draw everything, in order; None for what shows nothing."""
        chunks = [images[start : start + CHUNK] for start in range(0, len(images), CHUNK)]
        for drawn in self.threads.map(self._draw_chunk, chunks):
            yield from drawn

    def _draw_chunk(self, chunk: Sequence[Drawable]) -> list[Drawn | None]:
        worker = self.idle.get()
        try:
            return _ask(worker, chunk)
        finally:
            self.idle.put(worker)

    def __enter__(self) -> Drawers:
        return self

    def __exit__(self, *problem: object) -> None:
        for worker in self.workers:
            worker.kill()
        # Chunks that wait are dropped; those under way fail, because their worker is gone.
        self.threads.shutdown(cancel_futures=True)
        for worker in self.workers:
            worker.communicate()


def serve() -> None:
    """Draw the chunks that come on stdin and answer on stdout, until the parent closes the pipe or is gone."""
    _hide_panics()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the pipe
    # Opened anew: where Python runs unbuffered, sys.stdout may write only a part of what it is given.
    with open(0, "rb", closefd=False) as requests, open(1, "wb", closefd=False) as answers:
        while True:
            try:
                chunk = _receive(requests)
            except EOFError:
                return
            _send(answers, [draw_one(image) for image in chunk])


def _hide_panics() -> None:
    """resvg prints each panic, although it is caught and the image left out; Python's own errors still show."""
    sys.stderr = os.fdopen(os.dup(2), "w")
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _send(pipe: IO[bytes], value: object) -> None:
    # With its length in front: pickle.load on a pipe reads ahead and would wait for bytes that never come.
    content = pickle.dumps(value)
    pipe.write(LENGTH.pack(len(content)) + content)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    content = pipe.read(LENGTH.unpack(head)[0])
    return pickle.loads(content)


def _start_worker() -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-c", "from neuclip.datasets.workers import serve; serve()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _ask(worker: subprocess.Popen[bytes], chunk: Sequence[Drawable]) -> list[Drawn | None]:
    assert worker.stdin and worker.stdout
    try:
        _send(worker.stdin, chunk)
        answer: list[Drawn | None] = _receive(worker.stdout)
    except (EOFError, OSError) as problem:
        raise RunFailed(
            f"a process that draws images ended early (exit code {worker.wait()}); try again with more free memory"
        ) from problem
    return answer
