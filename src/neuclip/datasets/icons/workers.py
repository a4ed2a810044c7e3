"""Drawing in several child processes: chunks of drawings in, drawn chunks out.

Plain child processes rather than multiprocessing: that one runs the user's script again in every child, and a script
without a `__main__` guard would build the set inside the build.
"""

from __future__ import annotations

import hashlib
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
from typing import IO, Any, NamedTuple

from neuclip.datasets.icons.drawing import Glyph, draw
from neuclip.datasets.icons.near_duplicates import thumbnail
from neuclip.datasets.png import encode_png
from neuclip.errors import RunFailed

CHUNK = 64
LENGTH = struct.Struct("<Q")


class Drawn(NamedTuple):
    """A drawn image, without its pixels: 30,000 of them fit well into memory."""

    png: bytes
    digest: bytes  # of the pixels
    thumbnail: tuple[bytes, bytes]


def draw_one(image: str | Glyph) -> Drawn | None:
    """None when there is nothing to see, or the document cannot be drawn."""
    try:
        pixels = draw(image)
    except ValueError:  # what resvg and draw_svg raise for a document they cannot read
        return None
    if pixels is None:
        return None
    return Drawn(encode_png(pixels), hashlib.sha256(pixels.tobytes()).digest(), thumbnail(pixels))


class Drawers:
    """Child processes that draw, for as long as the `with` block lasts.

    >>> with Drawers(2) as drawers:
    ...     first, second = drawers.draw([svg, another]), drawers.draw(more)        # doctest: +SKIP
    """

    def __init__(self, processes: int):
        self.workers = [_start_worker() for _ in range(max(1, processes))]
        self.threads = ThreadPoolExecutor(len(self.workers))
        self.idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)

    def draw(self, images: Sequence[str | Glyph]) -> Iterator[Drawn | None]:
        """Draw everything, in order; None for what shows nothing."""
        chunks = [images[start : start + CHUNK] for start in range(0, len(images), CHUNK)]
        for drawn in self.threads.map(self._draw_chunk, chunks):
            yield from drawn

    def _draw_chunk(self, chunk: Sequence[str | Glyph]) -> list[Drawn | None]:
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


def draw_all(images: Sequence[str | Glyph], processes: int) -> Iterator[Drawn | None]:
    """Draw everything, in order, in `processes` child processes."""
    with Drawers(processes) as drawers:
        yield from drawers.draw(images)


def serve() -> None:
    """Answer chunks from stdin on stdout until the parent closes the pipe, or is gone."""
    _hide_panics()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer; this process then sees the end
    # Opened anew: where Python runs unbuffered, sys.stdout may write only a part of what it is given.
    with open(0, "rb", closefd=False) as questions, open(1, "wb", closefd=False) as answers:
        while True:
            try:
                chunk = _receive(questions)
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
    command = [sys.executable, "-P", "-c", "from neuclip.datasets.icons.workers import serve; serve()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _ask(worker: subprocess.Popen[bytes], chunk: Sequence[str | Glyph]) -> list[Drawn | None]:
    assert worker.stdin and worker.stdout
    try:
        _send(worker.stdin, chunk)
        answer: list[Drawn | None] = _receive(worker.stdout)
    except (EOFError, OSError) as problem:
        raise RunFailed(
            f"a process that draws images ended early (exit code {worker.wait()}); try again with more free memory"
        ) from problem
    return answer
