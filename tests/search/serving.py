"""The page's server in a thread of this process, and requests to it as any program on this machine could send them."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from neuclip.models.build import BuiltModel
from neuclip.search.index import Folder, Searcher
from neuclip.search.server import Page


@contextlib.contextmanager
def page_of(models: dict[str, BuiltModel], photos: Path, *, top: int = 5) -> Iterator[Page]:
    folder = Folder.open(photos)
    with Page([Searcher.open(name, built, folder) for name, built in models.items()], top) as page:
        accept, connections = page.get_request, []
        page.get_request = lambda: connections.append(accept()) or connections[-1]  # type: ignore[func-returns-value]
        thread = threading.Thread(target=page.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield page
        finally:
            page.shutdown()
            thread.join()
            for connection, _ in connections:  # those that a browser keeps open would outlive the page
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]


def ask(page: Page, path: str, body: bytes | None = None, *, method: str = "", **headers: str) -> Answer:
    """`path`: behind the token, or all that is asked for where it begins with a space."""
    connection = http.client.HTTPConnection(*page.server_address, timeout=60)
    target = path[1:] if path.startswith(" ") else f"/{page.token}/{path}"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with contextlib.closing(connection):
        connection.request(method or ("POST" if body is not None else "GET"), target, body, named)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(), dict(answer.getheaders()))
