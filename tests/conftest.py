"""Settings of all tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings

from tests.builders.browser import BROWSER, Tab, browsing
from tests.builders.server import Server, serving

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it; texts would wrap otherwise than in a plain run

# The same examples each time, so that a change is judged by what it changed; and no deadline, which would be a timed
# assertion. To search for new examples: pytest --hypothesis-profile search
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory) -> Iterator[Iterator[Path]]:
    """Cache folders, none of them the user's. The first is that of fixtures which outlive a test."""
    folder = tmp_path_factory.mktemp("caches")
    folders = (folder / str(number) for number in count())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEUCLIP_CACHE", str(next(folders)))
        yield folders


@pytest.fixture(autouse=True)
def cache(caches, monkeypatch) -> Iterator[Path]:
    """This test's own cache folder, which is not there yet."""
    folder = next(caches)
    monkeypatch.setenv("NEUCLIP_CACHE", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def tab() -> Iterator[Tab]:
    """A page of a real browser, which tests use in turn."""
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    with browsing() as tab:
        yield tab


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    with serving(Server(tmp_path / "served")) as server:
        yield server
