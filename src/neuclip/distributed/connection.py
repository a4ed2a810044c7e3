"""Joining the ranks of a run, waiting for a rank as long as it lives, and naming the one that is missing.

The ranks meet at a key-value store (torchrun's, or the main rank's). All waiting here is done in Python: signals are
obeyed, and a line says whom the others wait for.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed as dist

from neuclip.distributed import collectives
from neuclip.distributed.stopping import interruptible, is_requested
from neuclip.errors import RunFailed, UserError

START_SECONDS = 600.0  # for all ranks to start
SILENT_SECONDS = 30.0  # then a line says which rank the others wait for
BEAT_SECONDS = 5.0  # between signs of life
ANSWER_SECONDS = 5.0  # for the other ranks to say that they have lost one, too

T = TypeVar("T")

_store: dist.Store | None = None
_meetings = 0  # of all ranks, so far


class LostRanks(RuntimeError):
    """Ranks that do not answer. `first`: whether this rank is the first of the others, which tells the user."""

    def __init__(self, message: str, first: bool):
        super().__init__(message)
        self.first = first


def init_process_group(device: torch.device) -> None:
    """Under torchrun: join the other ranks, with NCCL on a GPU and gloo elsewhere."""
    global _store, _meetings
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 or dist.is_initialized():
        return
    try:
        rank, address, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except KeyError as error:
        raise UserError(f"WORLD_SIZE is {ranks} and {error} is not set; start with torchrun") from error
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with interruptible():
        store = _open_store(address, port, rank, ranks)
        _wait_for_start(store, rank, ranks)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=collectives.STEP_TIMEOUT)
    _store, _meetings = store, 0


def destroy_process_group() -> None:
    global _store
    _store = None
    collectives.destroy_process_group()


def _open_store(address: str, port: int, rank: int, ranks: int) -> dist.Store:
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where, clock = f"rank 0 at {address}:{port}", Clock(START_SECONDS)
    while not hosts and not _is_open(address, port):  # torch would print pages about it
        if clock.is_over():
            raise LostRanks(f"{where} did not start within {clock}", first=rank == 1)
        if clock.speaks() and rank == 1:
            print(f"waiting for {where} to start", file=sys.stderr)
        time.sleep(0.2)
    try:
        limit = timedelta(seconds=START_SECONDS)
        return dist.TCPStore(address, port, ranks, hosts, limit, wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        raise RunFailed(f"{where} cannot listen; give torchrun another --master-port") from error


def _is_open(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5.0).close()
    except OSError:
        return False
    return True


def _wait_for_start(store: dist.Store, rank: int, ranks: int) -> None:
    store.set(f"neuclip/started/{rank}", "")
    clock = Clock(START_SECONDS)
    while missing := _absent(store, "started", ranks):
        first = rank == min(set(range(ranks)) - set(missing))
        if clock.is_over():
            raise LostRanks(f"{_name(missing)} of {ranks} did not start within {clock}", first)
        if clock.speaks() and first:
            print(f"waiting for {_name(missing)} of {ranks} to start", file=sys.stderr)
        time.sleep(0.05)


def meet() -> None:
    """Collective. Waits for all ranks, however long one of them works, while it shows signs of life."""
    global _meetings
    store, ranks = _store, collectives.world_size()
    if store is None or ranks == 1:
        return
    _meetings += 1
    _ask(lambda: store.add("neuclip/met", 1))
    watch, pause = Watch(store, ranks), 0.001
    while (_ask(lambda: store.add("neuclip/met", 0)) or 0) < _meetings * ranks:
        watch.look()
        time.sleep(pause)
        pause = min(0.2, 1.5 * pause)


def _ask(question: Callable[[], T], seconds: float | None = None) -> T | None:
    """The store's answer; None if there is none in time. In a thread: torch waits without end for a store whose host,
    the main rank if torchrun is not used, is stopped."""
    answers: list[T] = []

    def ask() -> None:
        with suppress(RuntimeError):  # the store is gone, and its host with it
            answers.append(question())

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(BEAT_SECONDS if seconds is None else seconds)
    return answers[0] if answers else None


@contextmanager
def signs_of_life() -> Iterator[None]:
    """Inside, a thread tells the ranks that wait in `meet` that this one is alive: a stopped process has none."""
    store, ranks = _store, collectives.world_size()
    if store is None or ranks == 1:
        yield
        return
    key, done = f"neuclip/beats/{collectives.rank()}", threading.Event()

    def beat() -> None:
        with suppress(RuntimeError):  # the store ends with its host
            while not done.wait(BEAT_SECONDS):
                store.add(key, 1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(BEAT_SECONDS)


class Watch:
    """Looks now and then whether the ranks that are waited for are alive."""

    def __init__(self, store: dist.Store, ranks: int):
        self.store, self.ranks = store, ranks
        self.beats = [-1] * ranks
        self.clocks = [Clock(collectives.STEP_TIMEOUT.total_seconds()) for _ in range(ranks)]
        self.next_look = time.monotonic() + BEAT_SECONDS

    def look(self) -> None:
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + BEAT_SECONDS
        before = self.beats
        beats = _ask(lambda: [self.store.add(f"neuclip/beats/{rank}", 0) for rank in range(self.ranks)])
        self.beats = [-1, *before[1:]] if beats is None else beats  # without an answer the host is silent
        for rank in range(self.ranks):
            if self.beats[rank] != before[rank] or (beats is None and rank > 0):
                self.clocks[rank] = Clock(self.clocks[rank].limit)
        silent = [rank for rank, clock in enumerate(self.clocks) if clock.seconds() > 2 * BEAT_SECONDS]
        lost = [rank for rank in silent if self.clocks[rank].is_over() or is_requested()]
        first = collectives.rank() == min(set(range(self.ranks)) - set(silent), default=0)
        if lost:
            raise LostRanks(f"{_name(lost)} does not answer", first)
        late = [rank for rank in silent if self.clocks[rank].speaks()]
        if late and first:
            print(f"waiting for {_name(late)}, which does not answer", file=sys.stderr)


class Clock:
    """Counts the seconds of one wait."""

    def __init__(self, limit: float):
        self.limit, self.start, self.lines = limit, time.monotonic(), 0

    def __str__(self) -> str:
        return f"{self.limit / 60:.3g} minutes"

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def is_over(self) -> bool:
        return self.seconds() > self.limit

    def speaks(self) -> bool:
        """Once after half a minute, and then each time the wait is four times as long."""
        spoken = self.seconds() > SILENT_SECONDS * 4**self.lines
        self.lines += spoken
        return spoken


def is_lost_connection(error: BaseException) -> bool:
    gloo = type(error) is RuntimeError and "gloo" in str(error)
    return gloo or isinstance(error, LostRanks | dist.DistError)


def find_lost_ranks(error: Exception) -> LostRanks:
    """After a lost connection: which ranks are gone, as far as the others can tell."""
    if isinstance(error, LostRanks):
        return error
    ranks, rank = dist.get_world_size(), dist.get_rank()
    missing = _roll_call(rank, ranks)
    who = f"{_name(missing)} of {ranks}" if missing else "another rank"
    return LostRanks(f"{who} has ended or does not answer", rank == min(set(range(ranks)) - set(missing)))


def _roll_call(rank: int, ranks: int) -> list[int]:
    """The ranks that did not get here too."""
    store, clock = _store, Clock(ANSWER_SECONDS)
    if store is None:
        return []

    def call() -> list[int]:
        store.set(f"neuclip/lost/{rank}", "")
        while (missing := _absent(store, "lost", ranks)) and not clock.is_over():
            time.sleep(0.05)
        return missing

    missing = _ask(call, 2 * ANSWER_SECONDS)
    return [0] if missing is None else missing


def _absent(store: dist.Store, key: str, ranks: int) -> list[int]:
    return [rank for rank in range(ranks) if not store.check([f"neuclip/{key}/{rank}"])]


def _name(ranks: Iterable[int]) -> str:
    """
    >>> _name([1, 3])
    'rank 1, rank 3'
    """
    return ", ".join(f"rank {rank}" for rank in ranks)
