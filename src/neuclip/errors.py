"""The ways things go wrong that are not our bug. The command line prints them as one line; bugs keep a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """A setting, flag, path or data set that cannot be used. The command exits with 2."""


class RunFailed(RuntimeError):
    """The run started and could not go on. What was written stays. The command exits with 1."""


class RunInterrupted(RuntimeError):
    """The run was asked to stop (Ctrl-C, SIGTERM and the like) and saved itself. The command exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code
