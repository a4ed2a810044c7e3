"""A hub of data sets on this machine: the few requests of huggingface_hub that listing and downloading need."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves ROOT/OWNER/NAME as data sets. `breaks`: bytes after which the next answer of a file stops, once."""

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.breaks: dict[str, int] = {}
        self.lies: dict[str, bytes] = {}  # what is sent in place of a file
        self.missing: set[str] = set()  # files that are listed and cannot be had
        self.sent: list[tuple[str, str]] = []  # file and range of each download

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def listing(self, repository: str) -> dict[str, object]:
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


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/datasets/"):
            owner, name = path.removeprefix("/api/datasets/").split("/")[:2]
            if (self.server.root / owner / name).is_dir():
                return self.reply(200, json.dumps(self.server.listing(f"{owner}/{name}")).encode(), body)
        elif path.startswith("/datasets/") and "/resolve/" in path:
            repository, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
            file = self.server.root / repository / rest.partition("/")[2]
            if file.name in self.server.missing:
                return self.reply(403, b"{}", body)
            if file.is_file():
                return self.send_file(file, body)
        return self.reply(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

    def send_file(self, file: Path, body: bool) -> None:
        content = file.read_bytes()
        etag = hashlib.sha256(content).hexdigest() if file.suffix == ".tar" else git_sha1(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        content = self.server.lies.get(file.name, content)
        asked = self.headers.get("Range", "")
        if body:
            self.server.sent.append((file.name, asked))
        if not asked:
            return self.reply(200, content, body, headers, self.server.breaks.pop(file.name, None) if body else None)
        start = int(asked.removeprefix("bytes=").partition("-")[0])
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self.reply(206, content[start:], body, headers)

    def reply(
        self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None, stop: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content[:stop])
        if stop is not None:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    hub = Hub(root)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
