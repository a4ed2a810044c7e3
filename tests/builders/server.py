"""Web servers that misbehave on demand: one for remote shards, one that huggingface_hub takes for its hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"
ENDLESS = ("endless", "trickle")


class Server(ThreadingHTTPServer):
    """Serves a folder. `faults[name]` is what goes wrong with the next requests for a file, first things first:
    "cut" (half of it comes), "short" (half, as if that were all), "stall" (half, then nothing), "fail" (503),
    "gone" (404), "deny" (403), "endless" (zeros without end), "trickle" (some bytes now and then, without end).

    `sent` counts the bytes of answers without end. A file that is not there has no size if it is to be endless."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), ShardHandler)
        self.folder = folder
        self.faults: dict[str, list[str]] = {}
        self.got: Counter[str] = Counter()
        self.sent = 0
        self.closing = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def spoil_everything(self, fault: str) -> None:
        self.faults = {file.name: [fault] * 1000 for file in self.folder.iterdir()}


class Handler(BaseHTTPRequestHandler):
    """Answers a request for the headers alone as it would answer for the content."""

    def do_HEAD(self) -> None:
        self.answer(with_content=False)

    def do_GET(self) -> None:
        self.answer(with_content=True)

    def answer(self, with_content: bool) -> None:
        raise NotImplementedError

    def log_message(self, *arguments: object) -> None:
        pass


class ShardHandler(Handler):
    server: Server

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


class Hub(ThreadingHTTPServer):
    """Serves ROOT/OWNER/NAME as data sets."""

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.root = root
        self.lies: dict[str, bytes] = {}  # what is sent in place of a file
        self.missing: set[str] = set()  # files that are listed and cannot be had
        self.sent: list[str] = []  # the files that were downloaded
        self.closing = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def listing(self, repository: str) -> dict[str, Any]:
        folder = self.root / repository
        files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.endswith(".npz"))
        return {"id": repository, "sha": REVISION, "siblings": [self.sibling(folder, file) for file in files]}

    def sibling(self, folder: Path, file: Path) -> dict[str, object]:
        content = file.read_bytes()
        facts = {"rfilename": file.relative_to(folder).as_posix(), "size": len(content), "blobId": git_sha1(content)}
        if file.suffix == ".tar":
            sha256 = hashlib.sha256(content).hexdigest()
            facts["lfs"] = {"sha256": sha256, "oid": sha256, "size": len(content), "pointerSize": 130}
        return facts


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class HubHandler(Handler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def answer(self, with_content: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/datasets/"):
            owner, name = path.removeprefix("/api/datasets/").split("/")[:2]
            if (self.server.root / owner / name).is_dir():
                listing = self.server.listing(f"{owner}/{name}")
                answer = self.tree(listing) if "/tree/" in path else listing
                return self.reply(200, json.dumps(answer).encode(), with_content)
        elif path.startswith("/datasets/") and "/resolve/" in path:
            repository, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
            file = self.server.root / repository / rest.partition("/")[2]
            if file.name in self.server.missing:
                return self.reply(403, b"{}", with_content)
            if file.is_file():
                return self.send_file(file, with_content)
        return self.reply(404, b"{}", with_content, {"X-Error-Code": "RepoNotFound"})

    def tree(self, listing: dict[str, Any]) -> list[dict[str, object]]:
        """The same files as another request of huggingface_hub wants them."""
        return [
            {"type": "file", "path": file["rfilename"], "oid": file["blobId"], "size": file["size"]}
            | ({"lfs": file["lfs"]} if "lfs" in file else {})
            for file in listing["siblings"]
        ]

    def send_file(self, file: Path, body: bool) -> None:
        content = file.read_bytes()
        etag = hashlib.sha256(content).hexdigest() if file.suffix == ".tar" else git_sha1(content)
        if body:
            self.server.sent.append(file.name)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": REVISION}
        self.reply(200, self.server.lies.get(file.name, content), body, headers)

    def reply(self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


T = TypeVar("T", Server, Hub)


@contextmanager
def serving(server: T) -> Iterator[T]:
    """In a thread of this process."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def join_fetching() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("fetch"):
            thread.join()
