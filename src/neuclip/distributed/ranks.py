"""The ranks of a run: joined, stopped and ended together. A rank that is lost is named.

Three things end a run before its time: an error, a signal, a rank that is gone. Whichever it is, every rank leaves at
the same place, one of them says why, and all have the same exit code. With one rank everything here is the identity.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, TypeVar

import torch
from torch import distributed as dist

from neuclip.distributed import collectives
from neuclip.distributed.collectives import all_gather_int, all_gather_object, is_main, rank, single_process
from neuclip.errors import RunFailed, RunInterrupted, UserError

T = TypeVar("T")

START_SECONDS = 600.0  # for all ranks to start
ANSWER_SECONDS = 5.0  # for the ranks that have lost one to say that they are there
# Batch systems announce the end of a job with SIGUSR1 or SIGUSR2; a lost terminal sends SIGHUP.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
SIGNALS = tuple(signal.Signals[name] for name in NAMES if name in signal.Signals.__members__)


# --- Joining, and losing a rank -----------------------------------------------------------------------------------


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Inside, the ranks that torchrun started are connected, with NCCL on a GPU and gloo elsewhere; a rank that loses
    the others ends in one line. Where they are connected already, or there is one, nothing happens."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 or dist.is_initialized():
        yield
        return
    try:
        own = int(os.environ["RANK"])
        store = _open_store(own, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    except KeyError as error:
        raise UserError(f"WORLD_SIZE is {ranks} and {error} is not set; start with torchrun") from error
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        with interruptible():
            missing = _roll_call(store, "start", own, ranks, START_SECONDS)
        if missing:
            limit = f"{START_SECONDS / 60:.3g} minutes"
            _fail(missing, own, ranks, f"did not start within {limit}; start all of them together")
        collectives.connect(store, own, ranks, "nccl" if device.type == "cuda" else "gloo")
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        what = "has ended or does not answer; its own message, or torchrun's, may say why; what was saved is kept: "
        _fail(_missing_ranks(store, own, ranks), own, ranks, what + "continue with --resume", error)
    collectives.disconnect()


def is_lost_connection(error: BaseException) -> bool:
    """NCCL's errors are DistErrors, gloo's are plain."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def _open_store(own: int, address: str, port: int) -> dist.Store:
    """The key-value store at which the ranks meet: torchrun's, else rank 0's."""
    hosts = own == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    end = time.monotonic() + START_SECONDS
    with interruptible():
        while not hosts and not _answers(address, port):  # torch would print pages about it
            if time.monotonic() > end:
                raise RunFailed(f"rank 0 at {address}:{port} did not start within {START_SECONDS / 60:.3g} minutes")
            time.sleep(0.1)
    try:
        limit = collectives.STEP_TIMEOUT
        store = dist.TCPStore(address, port, None, hosts, limit, wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        raise RunFailed(f"rank 0 cannot listen at {address}:{port}; give torchrun another --master-port") from error
    # torchrun's store outlives a restart, and so do the keys in it.
    return dist.PrefixStore(f"neuclip/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5.0).close()
    except OSError:
        return False
    return True


def _roll_call(store: dist.Store, name: str, own: int, ranks: int, seconds: float) -> list[int]:
    """The ranks that do not come to the call `name` within these seconds."""
    store.set(f"{name}/{own}", "")
    end = time.monotonic() + seconds
    while missing := [number for number in range(ranks) if not store.check([f"{name}/{number}"])]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return missing


def _missing_ranks(store: dist.Store, own: int, ranks: int) -> list[int]:
    """After a lost connection: the ranks that did not get here too."""
    answers: list[list[int]] = []

    def call() -> None:
        with suppress(RuntimeError):  # the store is gone, and its host with it
            answers.append(_roll_call(store, "lost", own, ranks, ANSWER_SECONDS))

    # In a thread: torch would wait without end for a store whose host, without torchrun rank 0, is stopped.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(2 * ANSWER_SECONDS)
    return answers[0] if answers else [0]


def _fail(missing: list[int], own: int, ranks: int, what: str, cause: Exception | None = None) -> NoReturn:
    """The first of the ranks that are left says it."""
    if own != min(set(range(ranks)) - set(missing)):
        raise SystemExit(1) from cause
    who = ", ".join(f"rank {number}" for number in missing) or "another rank"
    raise RunFailed(f"{who} of {ranks} {what}") from cause


# --- Signals ------------------------------------------------------------------------------------------------------


class StopRequest:
    """The signal that asked this rank to stop; 0: none. A training loop ends after its step, `interruptible` work at
    once; a second Ctrl-C ends everything at once."""

    def __init__(self) -> None:
        self.signal = 0
        self.message = "stopped before the first step; start again with the same command"
        self.interruptible = False
        self._process = os.getpid()

    def on_any_rank(self) -> bool:
        """Collective. Whether any rank was asked to stop; then all know the signal."""
        self.signal = max(all_gather_int(self.signal))
        return bool(self.signal)

    def remember(self, number: int, frame: FrameType | None = None) -> None:
        if os.getpid() != self._process:  # a data worker just forked, without handlers of its own yet
            os._exit(128 + number)
        again = self.signal == number == signal.SIGINT
        self.signal = number
        if again or self.interruptible:
            self.interruptible = False  # what cleans up is not interrupted a second time
            raise KeyboardInterrupt


_stop = StopRequest()  # without handlers: a signal does what it does anywhere


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Inside, signals are requests to stop. An interruption ends as RunInterrupted on the main rank, and silently with
    the same exit code on the others."""
    global _stop
    before, _stop = _stop, StopRequest()
    # nohup ignores SIGHUP, and so do we then.
    handled = [n for n in SIGNALS if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, _stop.remember) for number in handled}
    try:
        yield _stop
    except KeyboardInterrupt:
        if not _stop.signal:
            raise
        raise_on_main(RunInterrupted(_stop.message, 128 + _stop.signal))
    finally:
        _stop = before
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def interruptible(allowed: bool = True) -> Iterator[None]:
    """Inside, a request to stop raises KeyboardInterrupt at once, and one that came before raises it at the start. Only
    for work in which no other rank takes part: a rank that left a collective would let the others wait."""
    before, _stop.interruptible = _stop.interruptible, allowed
    try:
        if allowed and _stop.signal:
            raise KeyboardInterrupt
        yield
    finally:
        _stop.interruptible = before


# --- Errors -------------------------------------------------------------------------------------------------------


def exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + (_stop.signal or signal.SIGINT)
    if isinstance(error, RunInterrupted):
        return error.exit_code
    return 2 if isinstance(error, UserError) else 1


def raise_first(error: BaseException | None) -> None:
    """Collective; waits as long as another rank works. If any rank has an error, all end: the first rank that has one
    raises it, the others exit silently with the same code. An interruption is raised on all."""
    codes = all_gather_int(0 if error is None else exit_code(error), patient=True)
    failed = next((number for number, code in enumerate(codes) if code), None)
    if failed is None:
        return
    if error is not None and rank() == failed:
        raise error
    if codes[failed] > 128:
        _stop.signal = codes[failed] - 128
        raise KeyboardInterrupt
    raise SystemExit(codes[failed])


def raise_on_main(error: Exception, *, cause: Exception | None = None) -> NoReturn:
    """For an error that every rank has found by itself: the main rank raises it, the others exit silently."""
    if is_main():
        raise error from cause
    raise SystemExit(exit_code(error))


@contextmanager
def sync_errors(*, may_stop: bool = True) -> Iterator[None]:
    """Collective. If one rank fails in the block, all end here instead of waiting later for a rank that is gone.
    Nothing inside may be collective itself. A request to stop interrupts the block if it `may_stop`."""
    failure: BaseException | None = None
    try:
        with interruptible(may_stop):
            yield
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    raise_first(failure)


def on_main_rank(action: Callable[[], T], *, may_stop: bool = True) -> T | None:
    """Collective. The main rank runs `action` as a single process while the others wait; they get None."""
    result = None
    with sync_errors(may_stop=may_stop):
        if is_main():
            with single_process():
                result = action()
    return result


def from_main_rank(action: Callable[[], T]) -> T:
    """Collective. What `action` returns on the main rank, on all ranks."""
    return all_gather_object(on_main_rank(action))[0]  # type: ignore[return-value]


def main_rank_first(action: Callable[[], T]) -> T:
    """Collective. The main rank runs `action` first: the others then find in the cache what it had to build."""
    result = on_main_rank(action)
    with sync_errors():
        if result is None:
            result = action()
    assert result is not None
    return result
