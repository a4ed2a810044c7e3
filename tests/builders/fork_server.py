"""A process that has imported what a command needs, and forks itself for each child a test asks for.

An interpreter that imports torch and open_clip takes four seconds of a core; a fork of this one a fraction of one. One
request at a time comes over a socket: `Start` is answered with a process id, `Wait` with that process's exit code.
processes.py starts it, one for each process that runs tests.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

STANDARD_FILES = 3  # stdin, stdout, stderr
PRELOADED = ("neuclip.api", "neuclip.cli.main", "tests.conftest")  # the last: what modules of tests import


@dataclass(frozen=True)
class Start:
    """What a child is to do, and the surroundings that it would have had as a child of the test itself."""

    folder: str
    environment: dict[str, str]
    import_path: list[str]
    work: bytes  # pickled (function, arguments): read in the child, which imports the function's module


@dataclass(frozen=True)
class Wait:
    pid: int


def send(connection: socket.socket, message: object, files: list[int]) -> None:
    data = pickle.dumps(message)
    socket.send_fds(connection, [len(data).to_bytes(8, "little")], files)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """The next message and the files sent with it; (None, []) when the other side is gone."""
    head, files, _, _ = socket.recv_fds(connection, 8, STANDARD_FILES)
    if not head:
        return None, []
    left, data = int.from_bytes(head, "little"), bytearray()
    while len(data) < left:
        data += connection.recv(left - len(data))
    return pickle.loads(data), files


def serve(connection: socket.socket) -> None:
    """Answer requests until there are none."""
    while True:
        request, files = receive(connection)
        if request is None:
            return
        if isinstance(request, Wait):
            status = os.waitpid(request.pid, 0)[1]
            send(connection, os.waitstatus_to_exitcode(status), [])
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            end(request, files)
        for file in files:
            os.close(file)
        send(connection, pid, [])


def end(request: Start, files: list[int]) -> NoReturn:
    """Do the work and end with its exit code as an interpreter ends, but leave its memory to the system: to release
    all that was imported takes a second."""
    code = 1
    try:
        code = work(request, files)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def work(request: Start, files: list[int]) -> int:
    os.setsid()  # a signal to its group reaches its workers, and nobody else
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout = open(0, encoding="utf-8"), open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored below nohup, and by whoever inherits it
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    sys.path[:] = request.import_path
    function, arguments = pickle.load(io.BytesIO(request.work))
    code = function(*arguments)
    return code if isinstance(code, int) else 0


def main(connection: int) -> None:
    """The process itself: import once, then serve the socket with that number."""
    for name in PRELOADED:
        importlib.import_module(name)
    models = importlib.import_module("neuclip.models")
    models.open_clip_module()
    sys.modules["torch"].set_num_threads(1)  # a pool of threads would not survive the fork
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # or a child's first collection would copy the pages of all objects
    serve(socket.socket(fileno=connection))
