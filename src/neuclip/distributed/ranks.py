"""Start, stop and end all ranks of a run together, and name a rank that is lost.

Three things end a run early: an error, a signal, or a lost rank. In each case all ranks leave at the same place, one of
them prints the reason, and all exit with the same code. With one rank nothing here waits or communicates.
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

START_SECONDS = 600.0  # time for all ranks to start
ANSWER_SECONDS = 5.0  # time for the ranks that are left to answer a roll call after one is lost
# Batch systems announce the end of a job with SIGUSR1 or SIGUSR2; a lost terminal sends SIGHUP.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
SIGNALS = tuple(signal.Signals[name] for name in NAMES if name in signal.Signals.__members__)


# --- Connecting the ranks, and losing one -------------------------------------------------------------------------


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Inside, the ranks that torchrun started are connected, with NCCL on a GPU and gloo elsewhere. If a rank loses the
    others, it fails with a one-line message. Does nothing with one rank, or if the ranks are already connected."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 or dist.is_initialized():
        yield
        return
    try:
        this_rank = int(os.environ["RANK"])
        store = _open_store(this_rank, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    except KeyError as error:
        raise UserError(f"WORLD_SIZE is {ranks}, but {error} is not set; start with torchrun") from error
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        with interruptible():
            missing = _roll_call(store, "start", this_rank, ranks, START_SECONDS)
        if missing:
            limit = f"{START_SECONDS / 60:.3g} minutes"
            _fail(missing, this_rank, ranks, f"did not start within {limit}; start all ranks together")
        collectives.connect(store, this_rank, ranks, "nccl" if device.type == "cuda" else "gloo")
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        what = "has ended or does not answer; see its own message or torchrun's for the reason; "
        remedy = "checkpoints are kept: continue with --resume"
        _fail(_missing_ranks(store, this_rank, ranks), this_rank, ranks, what + remedy, error)
    collectives.disconnect()


def is_lost_connection(error: BaseException) -> bool:
    """Whether the error says that the connection to other ranks is lost. NCCL raises DistErrors, gloo plain ones."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def _open_store(this_rank: int, address: str, port: int) -> dist.Store:
    """The key-value store at which the ranks meet: that of torchrun, or else of rank 0."""
    is_host = this_rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    end = time.monotonic() + START_SECONDS
    with interruptible():
        while not is_host and not _answers(address, port):  # torch would print pages of messages while it waits
            if time.monotonic() > end:
                raise RunFailed(f"rank 0 at {address}:{port} did not start within {START_SECONDS / 60:.3g} minutes")
            time.sleep(0.1)
    try:
        limit = collectives.STEP_TIMEOUT
        store = dist.TCPStore(address, port, None, is_host, limit, wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        raise RunFailed(f"rank 0 cannot listen at {address}:{port}; give torchrun another --master-port") from error
    # torchrun's store keeps its keys across restarts: each attempt has keys of its own.
    return dist.PrefixStore(f"neuclip/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5.0).close()
    except OSError:
        return False
    return True


def _roll_call(store: dist.Store, name: str, this_rank: int, ranks: int, seconds: float) -> list[int]:
    """The ranks that do not answer the roll call `name` within `seconds`."""
    store.set(f"{name}/{this_rank}", "")
    end = time.monotonic() + seconds
    while missing := [number for number in range(ranks) if not store.check([f"{name}/{number}"])]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return missing


def _missing_ranks(store: dist.Store, this_rank: int, ranks: int) -> list[int]:
    """The ranks that are lost: those that do not answer a roll call after the connection broke."""
    answers: list[list[int]] = []

    def call() -> None:
        with suppress(RuntimeError):  # the store's host is lost, and the store with it
            answers.append(_roll_call(store, "lost", this_rank, ranks, ANSWER_SECONDS))

    # In a thread: if the store's host (without torchrun: rank 0) is stopped, torch waits for it forever.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(2 * ANSWER_SECONDS)
    return answers[0] if answers else [0]


def _fail(missing: list[int], this_rank: int, ranks: int, what: str, cause: Exception | None = None) -> NoReturn:
    """Raise RunFailed on the first of the ranks that are left; the others exit silently."""
    if this_rank != min(set(range(ranks)) - set(missing)):
        raise SystemExit(1) from cause
    who = ", ".join(f"rank {number}" for number in missing) or "another rank"
    raise RunFailed(f"{who} of {ranks} {what}") from cause


# --- Signals ------------------------------------------------------------------------------------------------------


class StopRequest:
    """Whether a signal asked this rank to stop: `signal` is its number, or 0. The training loop then ends after its
    step, `interruptible` work ends at once. A second Ctrl-C ends everything at once."""

    def __init__(self) -> None:
        self.signal = 0
        self.message = "stopped before the first step; start again with the same command"
        self.interruptible = False
        self._process = os.getpid()

    def on_any_rank(self) -> bool:
        """Whether any rank was asked to stop. Collective: all ranks learn the signal."""
        self.signal = max(all_gather_int(self.signal))
        return bool(self.signal)

    def remember(self, number: int, frame: FrameType | None = None) -> None:
        """The signal handler."""
        if os.getpid() != self._process:  # a data worker that was just forked and has no handlers of its own yet
            os._exit(128 + number)
        again = self.signal == number == signal.SIGINT
        self.signal = number
        if again or self.interruptible:
            self.interruptible = False  # so that no second signal interrupts the clean-up
            raise KeyboardInterrupt


_stop = StopRequest()  # no handlers are installed outside `stop_requests`: signals act as usual


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Inside, signals are requests to stop. A KeyboardInterrupt that such a request caused becomes RunInterrupted on
    the main rank; the other ranks exit silently with the same code."""
    global _stop
    before, _stop = _stop, StopRequest()
    # Signals that were ignored before stay ignored, except Ctrl-C: nohup ignores SIGHUP.
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
    """Inside, a request to stop raises KeyboardInterrupt at once; an earlier request raises it at the start. Only for
    work without collectives: if a rank left a collective, the others would wait for it."""
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
    """End all ranks if any rank has an error: the first rank that has one raises it, the others exit silently with the
    same code. An interruption is raised on all ranks. Collective; waits up to PATIENCE for a rank that works alone."""
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
    """Raise an error that every rank has found by itself: the main rank raises it, the others exit silently."""
    if is_main():
        raise error from cause
    raise SystemExit(exit_code(error))


@contextmanager
def sync_errors(*, may_stop: bool = True) -> Iterator[None]:
    """If one rank fails inside the block, all ranks end at its end, instead of waiting later for the one that is gone.
    Collective; the block itself must not be collective. With `may_stop` a request to stop interrupts the block."""
    failure: BaseException | None = None
    try:
        with interruptible(may_stop):
            yield
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    raise_first(failure)


def on_main_rank(action: Callable[[], T], *, may_stop: bool = True) -> T | None:
    """Run `action` on the main rank, as a single process, while the others wait; they get None. Collective."""
    result = None
    with sync_errors(may_stop=may_stop):
        if is_main():
            with single_process():
                result = action()
    return result


def from_main_rank(action: Callable[[], T]) -> T:
    """Run `action` on the main rank and return its result on all ranks. Collective."""
    return all_gather_object(on_main_rank(action))[0]  # type: ignore[return-value]


def main_rank_first(action: Callable[[], T]) -> T:
    """Run `action` on the main rank, then on the others, which find in the cache what it has built. Collective."""
    result = on_main_rank(action)
    with sync_errors():
        if result is None:
            result = action()
    assert result is not None
    return result
