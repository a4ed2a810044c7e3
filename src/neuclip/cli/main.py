"""`neuclip COMMAND ...`: runs a command, and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module

from neuclip import __version__
from neuclip.cli.threads import let_threads_sleep
from neuclip.errors import RunFailed, RunInterrupted, UserError, proposal
from neuclip.secrets import without_secrets

COMMANDS = {
    "train": "train a model; without arguments: a demo on a data set of icons",
    "eval": "measure retrieval and zero-shot accuracy of a run, a checkpoint or a model",
    "error": "measure how far a run's normalizers are from the exact ones",
    "report": "write one self-contained HTML page per run",
    "compare": "put runs side by side: curves, means over seeds, tables for a paper",
    "search": "find images of a folder by a text or an image, in the terminal or on a local page",
    "merge": "write the model between a fine-tuned run and what it started from",
    "export": "write a model for transformers, onnxruntime or open_clip",
    "doctor": "check data and settings before training, in seconds",
    "data": "list and prepare data sets by name; index your own, or convert it to shards",
    "recipe": "print the paper's settings as recipes",
}

HELP = f"""neuclip {__version__}: CLIP training with normalizers over the whole data set.

usage: neuclip COMMAND ...

{"".join(f"  {name:<9}{text}{chr(10)}" for name, text in COMMANDS.items())}
Help on a command: neuclip COMMAND --help

examples:
  neuclip train
  neuclip train --help
"""

DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 failed, 2 user error, 128 + signal if interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    let_threads_sleep()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be outside what a terminal can show
    return exit_code_of(lambda: dispatch(arguments))


def dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command == "help" and arguments[1:]:
        return dispatch([*arguments[1:], "--help"])
    if command in ("--help", "-h", "help"):
        print(HELP, end="")
        return DONE
    if command == "--version":
        print(f"neuclip {__version__}")
        return DONE
    if command not in COMMANDS:
        what = f"the flag {command} has no command before it" if command.startswith("-") else f"no command {command!r}"
        raise UserError(f"{what}; {proposal(command, [*COMMANDS])}")
    module = import_module(f"neuclip.cli.{command}")
    if {"--help", "-h"} & set(arguments):
        help_page = getattr(module, "help_page", lambda _: module.COMMAND.help())
        print(help_page(arguments[1:]), end="")
        return DONE
    return module.run(arguments[1:])


def exit_code_of(action: Callable[[], int]) -> int:
    """The exit code of `action`. A user error or a failed run is one line on stderr; a bug keeps its traceback."""
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
    except Exception as error:
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            return FAILED
        if isinstance(error, OSError) and (reason := disk_error(error)):
            return complain(reason, FAILED)
        traceback.print_exc()
        return FAILED


def disk_error(error: OSError) -> str:
    """The message about a full disk or a folder that cannot be written; "" for any other error, which may be a bug."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = f" for {error.filename}" if error.filename else ""
        return (
            f"the disk is full: no space{where}; what was written is kept; free some space and continue "
            "(train: with --resume), or give another --run.folder, or NEUCLIP_CACHE for prepared data"
        )
    if error.filename and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR):
        return (
            f"{error.filename}: {os.strerror(error.errno)}; check the permissions of the folder, or give another "
            "(NEUCLIP_CACHE is the cache folder)"
        )
    return ""


def complain(message: str, code: int) -> int:
    if os.environ.get("NEUCLIP_DEBUG") == "1":
        traceback.print_exc()
    print("neuclip:", without_secrets(" ".join(message.splitlines())), file=sys.stderr)
    return code


def reader_is_gone() -> bool:
    """Whether the reader of our own output has closed it, as in `neuclip train --help | head -1`."""
    for stream in (sys.stdout, sys.stderr):
        try:
            print(file=stream, flush=True)  # writing nothing would not fail: only a byte shows that the pipe is closed
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # otherwise Python complains again at exit
            return True
    return False
