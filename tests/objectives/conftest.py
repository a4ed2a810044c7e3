"""The same tests in strips of any height."""

from __future__ import annotations

import pytest

from neuclip.objectives import pairs
from tests.objectives.features import B


@pytest.fixture(params=["1 row", "4 rows", "4 rows, kept", "all rows"])
def strips(request, monkeypatch) -> None:
    """The same test with a batch of B pairs in strips of so many rows, kept for the backward pass or not."""
    rows = {"1": 1, "4": 4, "a": B}[request.param[0]]
    monkeypatch.setattr(pairs, "STRIP", {"cpu": rows * 2 * B})
    monkeypatch.setattr(pairs, "KEPT", 2 * B * B if request.param in ("4 rows, kept", "all rows") else 0)
