"""Processes and ranks: children that start in a moment, killed where a test says, and ranks that are threads.

>>> run(main, ["recipe"]).code                                 # a process of its own
0
>>> main_killed_at_write(3, ["train", "settings.yaml"]).code   # killed within its third write
-9
>>> [rank.code for rank in main_on_ranks(2, ["train", "settings.yaml"])]
[0, 0]
>>> threads(2, lambda rank: sum_over_ranks(torch.tensor(rank)))
[tensor(1), tensor(1)]
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from torch import distributed as dist

from tests.builders.fork_server import Start, Wait, receive, send

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds; a child that takes longer is killed, and its test fails by its exit code


@dataclass(frozen=True)
class Ended:
    """A child that has ended: its exit code (the signal below zero if one killed it) and what it wrote."""

    code: int
    output: str
    errors: str


class Child:
    """A running child. `stdin` and `stdout` are text files to talk with it; `wait` reads the rest."""

    def __init__(self, work: tuple[Callable[..., int | None], tuple[Any, ...]], environment: dict[str, str]) -> None:
        its_input, own_output = os.pipe()
        own_input, its_output = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        here = str(Path.cwd())
        request = Start(here, environment, [path or here for path in sys.path], pickle.dumps(work))
        self.pid: int = _ask(request, [its_input, its_output, self._errors.fileno()])
        os.close(its_input)
        os.close(its_output)
        self._code: int | None = None
        self.stdin = os.fdopen(own_output, "w")
        self.stdout = os.fdopen(own_input, errors="replace")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def ends(self) -> int:
        """Wait for its end alone, not for processes of its own that may live on; its exit code."""
        if self._code is None:
            self._code = _ask(Wait(self.pid), [])
        return self._code

    def wait(self) -> Ended:
        """Wait until nobody writes any more, and it has ended."""
        too_late = threading.Timer(LIMIT, os.killpg, [self.pid, signal.SIGKILL])
        too_late.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it did not read all, or anything
                self.stdin.close()
            output = self.stdout.read()
            code = self.ends()
        finally:
            too_late.cancel()
            self.stdout.close()
        self._errors.seek(0)
        with self._errors as errors:
            return Ended(code, output, errors.read().decode(errors="replace"))


def start(function: Callable[..., int | None], *arguments: Any, **environment: str) -> Child:
    """A child that calls `function`, a function of a module, with the environment and folder of this process.

    What it returns is its exit code (None: 0); `environment` adds variables to those it inherits.
    """
    return Child((function, arguments), {**os.environ, **environment})


def run(function: Callable[..., int | None], *arguments: Any, **environment: str) -> Ended:
    """As `start`, and wait until it has ended."""
    return start(function, *arguments, **environment).wait()


def main_killed_at_write(write: int | str, arguments: Sequence[str]) -> Ended:
    """A command whose process is killed within a write of a file that must last: the `write`-th, counted from 1 and
    without those in the cache, or the first of a file with `write` in its path. Any code but -9: there was none."""
    return run(killed_at_write, write, list(arguments))


def killed_at_write(write: int | str, arguments: list[str]) -> int:
    with at_write(write, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        return _main(arguments)


def at_write(write: int | str, action: Callable[[], object], *, nth: int = 1) -> AbstractContextManager[None]:
    """Inside, `action` happens once, within the write that `main_killed_at_write` would be killed in; `nth`: not in the
    first of such a file. Everything that must last is flushed to the disk by `os.fsync`: it happens before the flush.
    """
    numbers = itertools.count(1)

    def is_chosen(file: int) -> bool:
        path = Path(f"/proc/self/fd/{file}").readlink()
        if isinstance(write, str):
            return write in str(path) and next(numbers) == nth
        return not path.is_relative_to(os.environ["NEUCLIP_CACHE"]) and next(numbers) == write

    return _before_call(os, "fsync", is_chosen, action)


@contextlib.contextmanager
def at_image(number: int, action: Callable[[], object], *, after: str = "") -> Iterator[None]:
    """Inside, `action` happens once, before this process decodes its `number`-th image, counted from 1 and from the
    first write of a file with `after` in its path. Data workers that are forked then count for themselves."""
    numbers, begun = itertools.count(1), [] if after else [True]
    decoding = _before_call(Image, "open", lambda *_: bool(begun) and next(numbers) == number, action)
    with at_write(after, lambda: begun.append(True)), decoding:
        yield


@contextlib.contextmanager
def _before_call(
    owner: object, name: str, is_chosen: Callable[..., bool], action: Callable[[], object]
) -> Iterator[None]:
    real, happened = getattr(owner, name), False

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal happened
        if not happened and is_chosen(*arguments):
            happened = True
            action()
        return real(*arguments, **options)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, real)


def main_on_ranks(number: int, arguments: Sequence[str]) -> list[Ended]:
    """A command on that many ranks of one machine, as torchrun starts them; what became of each."""
    return on_ranks(number, _main, list(arguments))


def _main(arguments: list[str]) -> int:
    from neuclip.cli.main import main

    return main(arguments)


def on_ranks(number: int, function: Callable[..., int | None], *arguments: Any) -> list[Ended]:
    """Any function of a module on that many ranks, each a process. As under torchrun, this process keeps the store at
    which they meet, and it outlives every rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    world = rank_variables(number) | torchrun | {"MASTER_PORT": str(store.port)}
    return [child.wait() for child in [start(function, *arguments, **world, **of_rank(rank)) for rank in range(number)]]


def rank_variables(number: int) -> dict[str, str]:
    """What all ranks of one machine are told: how many there are, and where they meet, which is at rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    return size | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def of_rank(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


_server: socket.socket | None = None  # the connection to this process's fork server


def _start_server() -> socket.socket:
    """A fork server that has imported everything; it ends with this process."""
    connection, other = socket.socketpair()
    code = f"from tests.builders.fork_server import main; main({other.fileno()})"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen([sys.executable, "-c", code], env=environment, pass_fds=[other.fileno()])
    other.close()

    def end() -> None:
        connection.close()
        server.wait()

    atexit.register(end)
    return connection


def _ask(request: Start | Wait, files: list[int]) -> int:
    """The server's answer. One that has ended is started again for a new child: once in a fresh clone one of two ended
    while it started, for a reason that was not found."""
    global _server
    for _ in range(3):
        _server = _server or _start_server()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send(_server, request, files)
            answer, _ = receive(_server)
            if answer is not None:
                return answer
        if isinstance(request, Wait):
            break
        _server = None
    raise RuntimeError("the fork server has ended; its own error is above")


def threads(ranks: int, work: Callable[[int], T]) -> list[T]:
    """`work(rank)` on that many ranks, which are threads of this process; what each returned, in rank order.

    The first error is raised, after the other ranks were released from what they waited for. What a module keeps in a
    global all ranks share.
    """
    import torch
    import torch._dynamo  # importing it within several threads at once fails
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    results: dict[int, T] = {}
    errors: list[BaseException] = []
    store = dist.HashStore()

    def one(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            results[rank] = work(rank)
            dist.destroy_process_group()
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        running = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(ranks)]
