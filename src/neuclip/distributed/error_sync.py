"""Errors that end every rank together, and work that only the main rank does.

With one process each function here just runs its action and lets its error through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import torch

from neuclip.distributed.collectives import all_gather_int, is_main, rank, single_process, world_size
from neuclip.distributed.connection import (
    destroy_process_group,
    find_lost_ranks,
    init_process_group,
    is_lost_connection,
    meet,
    signs_of_life,
)
from neuclip.distributed.stopping import interrupt_exit_code, interruptible, raise_interrupt
from neuclip.errors import RunFailed, RunInterrupted, UserError

T = TypeVar("T")


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Inside, the ranks that torchrun started are connected; a rank that loses the others fails in one line."""
    connected_before = world_size() > 1
    try:
        init_process_group(device)
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        lost = find_lost_ranks(error)
        if not lost.first:
            raise SystemExit(1) from error
        raise RunFailed(
            f"{lost}, and the run cannot go on without it; its own message, or torchrun's, may say why; "
            "what was saved is kept: continue with --resume"
        ) from error
    if not connected_before:
        destroy_process_group()


def exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return interrupt_exit_code()
    if isinstance(error, RunInterrupted):
        return error.exit_code
    return 2 if isinstance(error, UserError) else 1


def raise_first(error: BaseException | None) -> None:
    """Collective. If any rank has an error, all end: the first rank that has one raises it, the others exit silently
    with the same exit code. An interruption is raised on all."""
    codes = all_gather_int(0 if error is None else exit_code(error))
    failed = next((number for number, code in enumerate(codes) if code), None)
    if failed is None:
        return
    if error is not None and rank() == failed:
        raise error
    if codes[failed] > 128:
        raise_interrupt(codes[failed])
    raise SystemExit(codes[failed])


def raise_on_main(error: Exception, *, cause: Exception | None = None) -> NoReturn:
    """For an error that every rank has found by itself: the main rank raises it, the others exit silently."""
    if is_main():
        raise error from cause
    raise SystemExit(exit_code(error))


@contextmanager
def sync_errors() -> Iterator[None]:
    """Collective. If one rank fails in the block, all end here instead of waiting later for a rank that is gone.
    Nothing inside may be collective itself. A request to stop interrupts the block."""
    failure: BaseException | None = None
    with signs_of_life():
        try:
            with interruptible():
                yield
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        meet()
    raise_first(failure)


def on_main_rank(action: Callable[[], T]) -> T | None:
    """Collective. The main rank runs `action` as a single process while the others wait; they get None."""
    result = None
    with sync_errors():
        if is_main():
            with single_process():
                result = action()
    return result


def main_rank_first(action: Callable[[], T]) -> T:
    """Collective. The main rank runs `action` first: the others then find in the cache what it had to build."""
    result = on_main_rank(action)
    with sync_errors():
        if result is None:
            result = action()
    assert result is not None
    return result
