"""A web server for remote shards that stalls, cuts off, fails or forbids on demand."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from neuclip.data.tar.remote import Limits

ENDLESS = ("endless", "trickle")
QUICK = Limits(timeout=20, attempts=3, first_wait=0)


class Server(ThreadingHTTPServer):
    """Serves a folder. `faults[name]` is what goes wrong with the next requests for a file, first things first:
    "cut" (half of it comes), "short" (half, as if that were all), "stall" (half, then nothing), "fail" (503),
    "gone" (404), "deny" (403), "endless" (zeros without end), "trickle" (some bytes now and then, without end).

    `sent` counts the bytes of answers without end. A file that is not there has no size if it is to be endless."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.faults: dict[str, list[str]] = {}
        self.got: Counter[str] = Counter()
        self.sent = 0
        self.closing = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def spoil_everything(self, fault: str) -> None:
        self.faults = {file.name: [fault] * 1000 for file in self.folder.iterdir()}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self.answer(with_content=False)

    def do_GET(self) -> None:
        self.answer(with_content=True)

    def answer(self, with_content: bool) -> None:
        name = self.path.partition("?")[0].strip("/")
        file = self.server.folder / name
        if with_content:
            self.server.got[name] += 1
        faults = self.server.faults.get(name, [])
        fault = faults.pop(0) if faults and (with_content or faults[0] in ("fail", "gone", "deny")) else ""
        if fault in ENDLESS or (faults and faults[0] in ENDLESS and not file.is_file()):
            self.answer_without_end(fault)
            return
        status = {"fail": 503, "gone": 404, "deny": 403}.get(fault, 200 if file.exists() else 404)
        content = self.links() if file.is_dir() else file.read_bytes() if status == 200 else b""
        if fault == "short":
            content = content[: len(content) // 2]
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "text/html" if file.is_dir() else "application/x-tar")
        self.send_header("ETag", f'"{len(content)}"')
        self.end_headers()
        if with_content:
            self.wfile.write(content[: len(content) // 2] if fault in ("cut", "stall") else content)
        if fault == "stall":
            self.wfile.flush()
            self.server.closing.wait()

    def answer_without_end(self, fault: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/x-tar")
        self.end_headers()
        chunk = bytes({"endless": 1 << 16, "trickle": 1}.get(fault, 0))
        try:
            while chunk and not self.server.closing.wait(0.02 if fault == "trickle" else 0):
                self.wfile.write(chunk)
                self.server.sent += len(chunk)
        except OSError:  # the client has had enough
            pass

    def links(self) -> bytes:
        return "".join(f'<a href="{file.name}">x</a>' for file in self.server.folder.iterdir()).encode()

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    folder.mkdir()
    server = Server(folder)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()


def join_fetching() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("fetch"):
            thread.join()
