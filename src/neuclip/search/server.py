"""The server of the local search page, for the user of this machine only.

It listens on 127.0.0.1. Because other users, programs and web pages on this machine can reach this address, too, every
URL begins with a random token, and the Host header must be ours. (A web page elsewhere can let its own name point to
127.0.0.1, but then the Host header is that name.) Images are requested by number and sent re-encoded; no other file can
be requested.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from socketserver import ThreadingTCPServer
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image, ImageOps

from neuclip.data.decoding import decode
from neuclip.data.source import BadSample
from neuclip.errors import RunFailed, UserError
from neuclip.search.index import Searcher

ADDRESS = "127.0.0.1"
LARGEST_UPLOAD = 64 << 20  # bytes
LONGEST_TEXT = 10_000  # characters
SIDES = {"small": 320, "large": 1600}  # longest side of the images that are sent, pixels
MOST_SHOWN = 200
SHOWN_FIRST = 12  # images of the folder that are shown before the first search
TEXT = "text/plain; charset=utf-8"
TEMPLATES = Environment(
    loader=PackageLoader("neuclip.search"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)


class Refused(Exception):
    """A request is refused with this HTTP status and message."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


class Page(ThreadingTCPServer):
    """The server of the page. All `searchers` search the same folder; `address` is the URL for the user.

    >>> with Page(searchers, top=10) as page:                                              # doctest: +SKIP
    ...     print(page.address)
    ...     page.serve_forever()
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, searchers: Sequence[Searcher], top: int):
        super().__init__((ADDRESS, 0), Handler)
        self.searchers, self.top, self.folder = searchers, min(top, MOST_SHOWN), searchers[0].folder
        self.one_query = threading.Lock()  # one query at a time, because torch uses all cores for one
        self.token, port = secrets.token_urlsafe(24), self.server_address[1]
        self.hosts = {f"{name}:{port}" for name in (ADDRESS, "localhost")}
        self.address = f"http://{ADDRESS}:{port}/{self.token}/"
        script, style = (TEMPLATES.get_template(name).render() for name in ("search.js", "style.css"))
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        self.policy = (
            "default-src 'none'; img-src 'self' blob: data:; connect-src 'self'; style-src 'unsafe-inline'; "
            f"form-action 'self'; base-uri 'none'; frame-ancestors 'none'; script-src 'sha256-{digest}'"
        )
        self.html = TEMPLATES.get_template("page.html").render(
            folder=as_utf8(self.folder.path.resolve().name or str(self.folder.path)),
            images=max(len(searcher.ids) for searcher in searchers),
            models=[as_utf8(searcher.name) for searcher in searchers],
            skipped=max(len(searcher.faults) for searcher in searchers),
            first=self.first_images(),
            largest_upload=LARGEST_UPLOAD,
            style=style,
            script=script,
        )

    def first_images(self) -> list[dict[str, Any]]:
        """Images that the page shows before the first search, evenly spread over the folder."""
        ids = max((searcher.ids for searcher in self.searchers), key=len)
        spread = np.linspace(0, len(ids) - 1, min(SHOWN_FIRST, len(ids))).astype(int)
        return [{"id": int(id), "path": as_utf8(self.folder.files[id].path)} for id in ids[spread]]

    def has_image(self, number: str) -> bool:
        """Whether `number` is the id of an image."""
        # The limit comes first, because Python refuses to parse a number of thousands of digits.
        return number.isdecimal() and len(number) < 12 and int(number) < len(self.folder.files)

    def search(self, kind: str, body: bytes) -> dict[str, Any]:
        """The answer to a query. The body is an image file, or JSON: {"text": ...} or {"like": id of an image}."""
        query = self.parse_query(body) if kind.startswith("application/json") else decode(body)
        with self.one_query:
            results = [
                one.by_text(query, self.top) if isinstance(query, str) else one.by_image(query, self.top)
                for one in self.searchers
            ]
        matches = [[match._asdict() | {"path": as_utf8(match.path)} for match in best] for best in results]
        models = [as_utf8(one.name) for one in self.searchers]
        return {"models": [{"name": name, "matches": best} for name, best in zip(models, matches, strict=True)]}

    def parse_query(self, body: bytes) -> Any:
        """The text or the image of a JSON query."""
        try:
            query = json.loads(body)
            text, like = query.get("text"), query.get("like")
        except (ValueError, AttributeError, RecursionError):
            raise Refused(400, "the request is not a JSON object") from None
        if type(like) is int and 0 <= like < len(self.folder.files):
            try:
                return self.folder.read(like)
            except BadSample as bad:
                what = f"{as_utf8(self.folder.files[like].path)} cannot be opened ({bad.reason})"
                raise Refused(400, f"{what}; if the folder has changed, start neuclip search again") from bad
        if not isinstance(text, str) or len(text) > LONGEST_TEXT:
            raise Refused(400, f"the query must be a text of at most {LONGEST_TEXT:,} characters")
        return text

    def jpeg(self, id: int, side: int) -> bytes:
        """An image of the folder as a JPEG: rotated by its EXIF data, on white, its longest side at most `side`
        pixels."""
        image = self.folder.read(id, reduce_to=2 * side)  # decodes large photos several times faster
        with warnings.catch_warnings(action="ignore"):  # warnings about damaged EXIF data
            image = ImageOps.exif_transpose(image).convert("RGBA")
        image.thumbnail((side, side))
        flat = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
        file = BytesIO()
        flat.save(file, "JPEG", quality=85)
        return file.getvalue()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, except those of a browser that closes the connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers GET for the page and its images and POST for a query; refuses everything else."""

    server: Page
    protocol_version = "HTTP/1.1"
    timeout = 60.0  # seconds without a byte
    disable_nagle_algorithm = True  # otherwise the second part of a short answer waits for the first
    unread = 0  # bytes of the body that are not read yet

    def do_GET(self) -> None:
        self.respond(self.get)

    def do_POST(self) -> None:
        self.respond(self.post)

    def respond(self, method: Callable[[list[str]], tuple[str, bytes]]) -> None:
        """Send exactly one answer; an error becomes an answer with a message."""
        length = self.headers.get("content-length", "")
        self.unread = int(length) if length.isdecimal() and len(length) < 16 else 0
        try:
            status, (kind, content) = 200, method(self.path_parts())
        except Refused as refused:
            status, kind, content = refused.status, TEXT, str(refused).encode()
        except (UserError, RunFailed) as error:
            status, kind, content = 400, TEXT, str(error).encode(errors="replace")
        except BadSample as bad:
            status, kind, content = 400, TEXT, f"{bad.reason}; give a JPEG, PNG, WebP or similar file".encode()
        except ConnectionError:  # the browser has closed the connection
            raise
        except Exception:
            traceback.print_exc()
            status, kind, content = 500, TEXT, b"an error in neuclip search; the terminal shows it"
        self.send(status, kind, content)

    def path_parts(self) -> list[str]:
        """The parts of the path after the token. Refuses requests without the token or from another page."""
        pieces = self.path.partition("?")[0].split("/")  # "/token/image/small/7", or anything in a hostile request
        token, parts = (pieces[1], pieces[2:]) if len(pieces) > 1 else ("", [])
        origin = self.headers.get("origin", "")
        ours = self.headers.get("host") in self.server.hosts
        ours &= not origin or origin.removeprefix("http://") in self.server.hosts
        if ours and secrets.compare_digest(token.encode(), self.server.token.encode()):
            return parts
        raise Refused(403, "refused; open the whole address that neuclip search printed")

    def get(self, parts: list[str]) -> tuple[str, bytes]:
        page = self.server
        match parts:
            case []:  # the user lost the last slash, without which the page's relative URLs would be wrong
                raise Refused(308, "the address must end with a slash")
            case [""]:
                return "text/html; charset=utf-8", page.html.encode()
            case ["image", size, number] if size in SIDES and page.has_image(number):
                try:
                    return "image/jpeg", page.jpeg(int(number), SIDES[size])
                except BadSample as bad:
                    raise Refused(404, bad.reason) from bad
        raise Refused(404, "there is nothing at this address")

    def post(self, parts: list[str]) -> tuple[str, bytes]:
        if parts != ["search"]:
            raise Refused(404, "there is nothing at this address")
        if "content-length" not in self.headers:
            raise Refused(411, "the request has no content-length header")
        if self.unread > LARGEST_UPLOAD:
            raise Refused(413, f"the file is larger than {LARGEST_UPLOAD >> 20} MB; give a smaller image")
        body, self.unread = self.rfile.read(self.unread), 0
        return "application/json", json.dumps(self.server.search(self.headers.get("content-type", ""), body)).encode()

    def send(self, status: int, kind: str, content: bytes) -> None:
        # Read the rest of the body first: a client that is still sending when the connection closes sees no answer.
        while self.unread > 0 and (piece := self.rfile.read(min(self.unread, 1 << 20))):
            self.unread -= len(piece)
        headers = {
            "content-type": kind,
            "content-length": str(len(content)),
            "cache-control": "private, max-age=3600" if kind == "image/jpeg" else "no-store",
            "content-security-policy": self.server.policy,
            "referrer-policy": "no-referrer",  # the token is in the address
            "x-content-type-options": "nosniff",
        }
        if status == 308:
            headers["location"] = self.server.address
        if status != 200:
            headers["connection"] = "close"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer the requests that the base class refuses, such as those with other methods."""
        self.send(int(code), TEXT, (message or "refused").encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing on the terminal for a request."""


def as_utf8(name: str) -> str:
    """A file name in valid UTF-8, for the page. On Linux, a file name can be any bytes."""
    return os.fsencode(name).decode(errors="replace")
