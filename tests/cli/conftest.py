from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from neuclip.cli.main import COMMANDS


@pytest.fixture
def add_command(monkeypatch):
    """Adds a command as a contributor would, or replaces one: a function in a module, and its line in the table."""

    def add(name: str, function) -> None:
        monkeypatch.setitem(sys.modules, "neuclip.cli.added", SimpleNamespace(command=function))
        monkeypatch.setitem(COMMANDS, name, ("added.command", "was added"))

    return add
