"""`neuclip COMMAND ...`: runs a command and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module

from neuclip import __version__
from neuclip.errors import RunFailed, RunInterrupted, UserError, extras_for, proposal
from neuclip.secrets import without_secrets

COMMANDS = {  # name: module.function of this package, what it does
    "train": ("train.train", "train a model; without arguments: a demo on a data set of icons"),
    "eval": ("eval.evaluate", "measure retrieval and zero-shot accuracy of a run, a checkpoint or a model"),
    "error": ("eval.error", "measure how far a run's normalizers are from the exact ones"),
    "report": ("report.report", "write one self-contained HTML page per run"),
    "compare": ("report.compare", "compare runs: curves, means over seeds, tables for a paper"),
    "experiment": ("experiment.experiment", "run a table or a figure of the paper, at any scale"),
    "search": ("search.search", "search the images in a folder by text or image, in the terminal or on a local page"),
    "merge": ("export.merge", "average the weights of a fine-tuned model and of the model it started from"),
    "export": ("export.export", "write a model for transformers, onnxruntime or open_clip"),
    "doctor": ("train.doctor", "check a run before training: build it, take one step, report problems"),
    "recipe": ("train.recipe", "print the paper's settings as recipes"),
    "data get": ("data.get", "download evaluation sets of DataComp's 38 tasks"),
    "data convert": ("data.convert", "write your data as tar shards"),
    "data index": ("data.index", "index tar shards and report their samples and faults"),
}
GROUPS = {name.split()[0] for name in COMMANDS if " " in name}
HELP = ("--help", "-h")

DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
REFUSED = ("EROFS", "EACCES", "EPERM", "EEXIST", "ENOTDIR", "EISDIR", "ELOOP")  # the path cannot be written
THREADS_WAIT = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # if one is set, the user has chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 user error, 128 + signal if interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    set_environment()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # for file names that a terminal cannot show
    return exit_code_of(lambda: dispatch(arguments))


def set_environment() -> None:
    """Set environment variables that torch and its thread library read once, when they are imported.

    Waiting OpenMP threads spin by default. Beside other busy processes they take the cores from threads that have
    work: one of three runs on two cores trained at 30 to 40 samples/s, and at 270 with threads that sleep.
    """
    if not any(name in os.environ for name in THREADS_WAIT):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a lost rank prints C++ frames beside our line


def dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    first, *rest = arguments or ["--help"]
    if first in HELP or (first in GROUPS and rest[:1] and rest[0] in HELP):
        print(overview("" if first in HELP else f"{first} "), end="")
        return DONE
    if first == "--version":
        print(version_line())
        return DONE
    name = " ".join(arguments[:2]) if first in GROUPS else first
    if name not in COMMANDS:
        refuse_unknown(first, rest)
    from neuclip.cli.command import call, help_page

    module_name, _, function = COMMANDS[name][0].partition(".")
    module = import_module(f"neuclip.cli.{module_name}")
    command, rest = getattr(module, function), arguments[len(name.split()) :]
    if not set(HELP) & set(rest):
        with extras_for(name):
            return call(command, rest)
    own_help = getattr(module, f"{function}_help", None)
    print(own_help(rest) if own_help else help_page(command), end="")
    return DONE


def refuse_unknown(first: str, rest: list[str]) -> None:
    """Raise a UserError that proposes the nearest command, or lists the commands."""
    if first in GROUPS:
        actions = [name.split()[1] for name in COMMANDS if name.startswith(f"{first} ")]
        what = f"no action {rest[0]!r} of {first}" if rest else f"{first} needs an action"
        raise UserError(f"{what}; {proposal(''.join(rest[:1]), actions)}")
    what = f"no command before {first}" if first.startswith("-") else f"no command {first!r}"
    raise UserError(f"{what}; {proposal(first, list(dict.fromkeys(name.split()[0] for name in COMMANDS)))}")


def overview(group: str = "") -> str:
    """The help page with a line per command: all commands, or those of a group such as 'data '."""
    lines = [f"  {name:<14}{about}\n" for name, (_, about) in COMMANDS.items() if name.startswith(group)]
    if group:
        return (
            f"usage: neuclip {group}ACTION ...\n\n{''.join(lines)}\nHelp on an action: neuclip {group}ACTION --help\n"
        )
    return f"""neuclip {__version__}: CLIP training with normalizers over the whole data set.

usage: neuclip COMMAND ...

{"".join(lines)}
Help on a command: neuclip COMMAND --help

examples:
  neuclip train
  neuclip train --help
"""


def version_line() -> str:
    """'neuclip 0.1.0 (torch 2.13.0, open_clip 3.3.0, Python 3.11)', without importing these packages."""
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    return f"neuclip {__version__} (torch {installed('torch')}, open_clip {installed('open_clip_torch')}, {python})"


def installed(package: str) -> str:
    """The version of an installed package, or 'is missing'."""
    from importlib.metadata import PackageNotFoundError, version  # as in errors.install_command: imported late

    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "is missing"


def exit_code_of(action: Callable[[], int]) -> int:
    """Run `action` and return its exit code. A user error or a failed run prints one line on stderr; a bug prints its
    traceback."""
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
        if isinstance(error, OSError) and (reason := system_error(error)):
            return complain(reason, USER_ERROR if error.errno == errno.ENAMETOOLONG else FAILED)
        traceback.print_exc()
        return FAILED


def system_error(error: OSError) -> str:
    """A message with a remedy if the system refuses to write a file; "" for any other error, which may be a bug."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = f" for {error.filename}" if error.filename else ""
        return (
            f"the disk is full: no space{where}; files written so far are kept; free some space and continue (train: "
            "with --resume), or use another disk (--run.folder for runs, NEUCLIP_CACHE for prepared data)"
        )
    if error.errno == errno.ENAMETOOLONG:
        return f"a path is too long for this system; give a shorter one than {error.filename2 or error.filename}"
    if "No usable temporary directory" in str(error):  # from tempfile, which has tried TMPDIR and /tmp
        return "no folder for temporary files is writable; free some space, or set TMPDIR to another folder"
    refused = errno.errorcode.get(error.errno or 0) in REFUSED
    if error.filename and (refused or str(error.filename).startswith(("/proc/", "/sys/"))):  # not for files
        return (
            f"{error.filename}: {error.strerror}; check the permissions of the folder, or choose another "
            "(NEUCLIP_CACHE sets the cache folder)"
        )
    return ""


def complain(message: str, code: int) -> int:
    """Print the message as one line on stderr and return the exit code."""
    if os.environ.get("NEUCLIP_DEBUG") == "1":
        traceback.print_exc()
    print("neuclip:", without_secrets(" ".join(message.splitlines())), file=sys.stderr)
    return code


def reader_is_gone() -> bool:
    """Whether the program that reads our output has closed the pipe, as in `neuclip train --help | head -1`."""
    for stream in (sys.stdout, sys.stderr):
        try:
            print(file=stream, flush=True)  # at least one byte: an empty write does not fail on a closed pipe
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # otherwise Python complains again at exit
            return True
    return False
