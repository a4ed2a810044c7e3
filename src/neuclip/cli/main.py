"""`neuclip COMMAND ...`: finds the command, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module

from neuclip import __version__
from neuclip.cli.threads import let_threads_sleep
from neuclip.errors import RunFailed, RunInterrupted, UserError
from neuclip.settings.nearest import proposal

COMMANDS = {
    "train": "train a model; with nothing said: a demonstration on the built-in icons",
    "eval": "retrieval and zero-shot figures of a run, a checkpoint or a model",
    "error": "how far a run's normalizers are from the exact ones",
    "report": "one self-contained HTML page per run",
    "doctor": "what the data is and what training on it would meet, in seconds",
    "data": "built-in data sets: list, prepare; your own: index, convert into shards",
    "recipe": "the paper's settings as recipes: its data sets with every objective",
}

HELP = f"""neuclip {__version__}: CLIP training with normalizers over the whole data set.

usage: neuclip COMMAND ...

{"".join(f"  {name:<8}{text}{chr(10)}" for name, text in COMMANDS.items())}
Each command explains itself: neuclip COMMAND --help

examples:
  neuclip train
  neuclip train --help
"""

DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code: 0 done, 1 ran and failed, 2 asked wrongly, 128 + signal stopped."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    let_threads_sleep()
    return guarded(lambda: dispatch(arguments))


def dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in ("--help", "-h", "help"):
        print(HELP, end="")
        return DONE
    if command == "--version":
        print(f"neuclip {__version__}")
        return DONE
    if command not in COMMANDS:
        kind = "flag" if command.startswith("-") else "command"
        raise UserError(f"no {kind} {command!r}; {proposal(command, [*COMMANDS])}")
    return import_module(f"neuclip.cli.{command}").run(arguments[1:])


def guarded(action: Callable[[], int]) -> int:
    """The exit code of `action`. A user's mistake or a failed run is one line on stderr; a bug keeps its traceback."""
    try:
        code = action()
        sys.stdout.flush()
        return code
    except UserError as error:
        return complain(str(error), USER_ERROR)
    except RunFailed as error:
        return complain(str(error), FAILED)
    except RunInterrupted as stopped:
        return complain(str(stopped), stopped.exit_code)
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            return FAILED
        if reason := machines_fault(error):
            return complain(reason, FAILED)
        traceback.print_exc()
        return FAILED
    except Exception:
        traceback.print_exc()
        return FAILED


def machines_fault(error: OSError) -> str:
    """What to say of a full disk or a folder that cannot be written; "" for anything else, which may be a bug."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = f" for {error.filename}" if error.filename else ""
        return (
            f"the disk is full: no space{where}; what was written before is kept; make room and go on "
            "(train: with --resume), or give another --run.folder, or NEUCLIP_CACHE for prepared data"
        )
    if error.filename and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR):
        return (
            f"{error.filename}: {os.strerror(error.errno)}; check the permissions of its folder, or give another "
            "(the cache folder: NEUCLIP_CACHE)"
        )
    return ""


def complain(message: str, code: int) -> int:
    if os.environ.get("NEUCLIP_DEBUG") == "1":
        traceback.print_exc()
    print("neuclip:", " ".join(message.splitlines()), file=sys.stderr)
    return code


def reader_is_gone() -> bool:
    """Whether it was our own output that nobody reads any more, as in `neuclip train --help | head -1`."""
    for stream in (sys.stdout, sys.stderr):
        try:
            print(file=stream, flush=True)  # an empty write tells nothing: only a byte meets the closed end
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or Python complains again at exit
            return True
    return False
