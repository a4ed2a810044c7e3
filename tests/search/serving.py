"""The page's server in a thread of this process, and requests to it as any program on this machine could send them."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuclip.models.build import BuiltModel
from neuclip.search.folder import SearchedFolder
from neuclip.search.searcher import Searcher


@contextlib.contextmanager
def page_of(models: dict[str, BuiltModel], photos: Path, *, top: int = 5) -> Iterator[str]:
    """The page's address."""
    pytest.importorskip("starlette", reason="the page needs the extra `search`")
    pytest.importorskip("uvicorn", reason="the page needs the extra `search`")
    from neuclip.search.server import ADDRESS, create_server

    folder = SearchedFolder.open(photos)
    searchers = [Searcher.open(name, built, folder) for name, built in models.items()]
    with socket.create_server((ADDRESS, 0)) as listening:
        server, address = create_server(searchers, listening, top=top)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield address
        finally:
            server.should_exit = True
            thread.join()


def ask(address: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of an answer."""
    request = urllib.request.Request(address, body, {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)
