"""Settings of all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests.misbehaving_server import serving

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it; texts would wrap otherwise than in a plain run

# The same examples each time, so that a change is judged by what it changed; and no deadline, which would be a timed
# assertion. To search for new examples: pytest --hypothesis-profile search
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("repeatable")


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path / "served") as server:
        yield server
