"""What processes do together beside the maths: when one fails all end, and of all one writes and speaks.

With one process everything here is what its name says without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import torch
from torch import distributed as dist

from neuclip.distributed.collectives import (
    all_gather_int,
    gather_values,
    is_main,
    join_ranks,
    leave_ranks,
    rank,
    single_process,
    world_size,
)
from neuclip.errors import RunFailed, RunInterrupted, UserError

T = TypeVar("T")


@contextmanager
def processes(device: torch.device) -> Iterator[None]:
    """Inside, the processes that torchrun started know each other; one that loses the others fails in one line."""
    joined_before = world_size() > 1
    join_ranks(device)
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))):
            raise
        raise_together(
            RunFailed(
                "another process of this run has ended, and training cannot go on without it; its own message, or "
                "torchrun's, says why; what was saved is kept: continue with --resume"
            ),
            cause=error,
        )
    if not joined_before:
        leave_ranks()


def exit_code(error: Exception) -> int:
    if isinstance(error, RunInterrupted):
        return error.exit_code
    return 2 if isinstance(error, UserError) else 1


def raise_first(failure: Exception | None) -> None:
    """Collective. If it failed anywhere it ends everywhere: the first process that failed raises its error, the others
    leave without a word, with the same exit code."""
    codes = all_gather_int(0 if failure is None else exit_code(failure))
    speaker = next((number for number, code in enumerate(codes) if code), None)
    if speaker is None:
        return
    if failure is not None and rank() == speaker:
        raise failure
    raise SystemExit(codes[speaker])


def raise_together(error: Exception, *, cause: Exception | None = None) -> NoReturn:
    """For an end that every process has come to by itself: the main one raises it, the others leave without a word."""
    if is_main():
        raise error from cause
    raise SystemExit(exit_code(error))


@contextmanager
def sync_errors() -> Iterator[None]:
    """Collective. Nobody leaves the block before all have come through, and if one fails in it, all end here rather
    than wait later for one that is gone. Nothing inside may be collective itself."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    raise_first(failure)


def on_main(action: Callable[[], T]) -> T | None:
    """Collective. What `action` answers in the main process, which acts as if it were alone while the others wait."""
    answer = None
    with sync_errors():
        if is_main():
            with single_process():
                answer = action()
    return answer


def main_first(action: Callable[[], T]) -> T:
    """Collective. The main process acts first, so that the others find in the cache what it had to make."""
    answer = on_main(action)
    with sync_errors():
        if answer is None:
            answer = action()
    assert answer is not None
    return answer


def all_gather_str(text: str, device: torch.device) -> list[str]:
    """Collective. The text of each process, in rank order."""
    content = text.encode()
    sizes = all_gather_int(len(content))
    padded = torch.tensor(list(content.ljust(max(sizes))), dtype=torch.uint8, device=device)
    rows = gather_values(padded).cpu().unflatten(0, (len(sizes), max(sizes)))
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]
