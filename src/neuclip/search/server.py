"""The local page: for the person at this machine and nobody else.

It listens on 127.0.0.1. Other programs and web pages on this machine can reach that too, so every address begins with a
random token, and the Host header must be ours: a page elsewhere that lets its own name point to 127.0.0.1 has another.
Images are asked for by number, sent re-encoded, and nothing else of the disk can be asked for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from importlib import resources
from io import BytesIO
from typing import Any

import uvicorn
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image, ImageOps
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from neuclip.data.decoding import decode
from neuclip.data.source import BadSample
from neuclip.errors import UserError
from neuclip.search.searcher import Match, Searcher

ADDRESS = "127.0.0.1"
LARGEST_UPLOAD = 64 << 20  # bytes
LONGEST_TEXT = 10_000  # characters
SIDES = {"small": 320, "large": 1600}  # longest side of the images that are sent, pixels
MOST_SHOWN = 200

TEMPLATES = Environment(
    loader=PackageLoader("neuclip.search"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)


class Page:
    """What the page can ask for. `searchers` all search the same folder."""

    def __init__(self, searchers: Sequence[Searcher], top: int):
        self.searchers, self.top = searchers, top
        self.folder = searchers[0].folder
        self.lock = threading.Lock()  # one query at a time: torch uses all cores by itself

    def html(self) -> str:
        script = own_file("search.js")
        return TEMPLATES.get_template("page.html").render(
            folder=as_utf8(self.folder.path.resolve().name or str(self.folder.path)),
            images=max(searcher.index.usable for searcher in self.searchers),
            models=[as_utf8(searcher.name) for searcher in self.searchers],
            skipped=max(len(searcher.index.faults) for searcher in self.searchers),
            style=own_file("style.css"),
            script=script,
        )

    def find(self, search: Callable[[Searcher], list[Match]]) -> dict[str, Any]:
        with self.lock:
            found = [(as_utf8(searcher.name), search(searcher)) for searcher in self.searchers]
        return {"models": [{"name": name, "matches": [as_plain(match) for match in best]} for name, best in found]}

    def jpeg(self, id: int, side: int) -> bytes:
        """An image of the folder as people see it: turned as the camera was, on white, at most `side` pixels long."""
        image = ImageOps.exif_transpose(self.folder.read(id)).convert("RGBA")
        image.thumbnail((side, side))
        flat = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
        file = BytesIO()
        flat.save(file, "JPEG", quality=85)
        return file.getvalue()

    async def show(self, request: Request) -> Response:
        return HTMLResponse(self.html())

    async def search(self, request: Request) -> Response:
        """The body is an image, or JSON: {"text": ...} or {"like": number of an image}."""
        try:
            body = await read_body(request)
            if request.headers.get("content-type", "").startswith("application/json"):
                search = self._asked(body)
            else:
                search = self._like(await run_in_threadpool(decode, body))
            return JSONResponse(await run_in_threadpool(self.find, search))
        except BadSample as bad:
            return JSONResponse({"error": f"{bad.reason}: give a JPEG, PNG, WebP or similar file"}, 400)
        except UserError as error:
            return JSONResponse({"error": str(error)}, 400)

    def _asked(self, body: bytes) -> Callable[[Searcher], list[Match]]:
        try:
            asked = json.loads(body)
            text, like = asked.get("text"), asked.get("like")
        except (ValueError, AttributeError, RecursionError):
            raise UserError("the request is not a JSON object") from None
        if isinstance(like, int) and 0 <= like < len(self.folder.files):
            return self._like(self.folder.read(like))
        if not isinstance(text, str) or len(text) > LONGEST_TEXT:
            raise UserError(f"the query is not a text of at most {LONGEST_TEXT:,} letters")
        return lambda searcher: searcher.by_text(text, self.top)

    def _like(self, image: Any) -> Callable[[Searcher], list[Match]]:
        return lambda searcher: searcher.by_image(image, self.top)

    async def image(self, request: Request) -> Response:
        id, side = request.path_params["id"], SIDES.get(request.path_params["size"])
        if side is None or not 0 <= id < len(self.folder.files):
            return PlainTextResponse("no such image", 404)
        try:
            content = await run_in_threadpool(self.jpeg, id, side)
        except BadSample as bad:
            return PlainTextResponse(bad.reason, 404)
        return Response(content, media_type="image/jpeg", headers={"cache-control": "private, max-age=3600"})


def as_plain(match: Match) -> dict[str, Any]:
    return match._asdict() | {"path": as_utf8(match.path)}


def as_utf8(name: str) -> str:
    """A file's name as a page can show it: on Linux it need not be text."""
    return os.fsencode(name).decode(errors="replace")


class OnlyForUs:
    """Refuses every request without the token or with another Host; and tells the browser to load nothing else."""

    def __init__(self, app: Any, token: str, port: int):
        self.app, self.token = app, token
        self.hosts = {f"{name}:{port}".encode() for name in (ADDRESS, "localhost")}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        given = scope["path"].split("/")[1].encode()
        origin = headers.get(b"origin", b"")
        ours = headers.get(b"host") in self.hosts and (not origin or origin.removeprefix(b"http://") in self.hosts)
        if not ours or not secrets.compare_digest(given, self.token.encode()):
            refusal = PlainTextResponse("refused: use the whole address that neuclip search printed", 403)
            await refusal(scope, receive, send)
            return

        async def send_safely(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *safety_headers()]
            await send(message)

        await self.app(scope, receive, send_safely)


def create_app(searchers: Sequence[Searcher], *, top: int, token: str, port: int) -> OnlyForUs:
    page = Page(searchers, min(top, MOST_SHOWN))
    routes = [
        Route(f"/{token}/", page.show),
        Route(f"/{token}/search", page.search, methods=["POST"]),
        Route(f"/{token}/image/{{size}}/{{id:int}}", page.image),
    ]
    return OnlyForUs(Starlette(routes=routes), token, port)


async def read_body(request: Request) -> bytes:
    """Not `request.body()`, which takes whatever comes."""
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > LARGEST_UPLOAD:
            raise UserError(f"the file is larger than {LARGEST_UPLOAD >> 20} MB; give a smaller image")
    return bytes(content)


def safety_headers() -> list[tuple[bytes, bytes]]:
    digest = base64.b64encode(hashlib.sha256(own_file("search.js").encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src 'self' blob: data:; connect-src 'self'; style-src 'unsafe-inline'; "
        f"form-action 'self'; base-uri 'none'; frame-ancestors 'none'; script-src 'sha256-{digest}'"
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def own_file(name: str) -> str:
    return resources.files("neuclip.search").joinpath("templates", name).read_text(encoding="utf-8")


def serve(searchers: Sequence[Searcher], *, top: int, announce: Callable[[str], None]) -> None:
    """Until Ctrl-C. `announce` is told the address once it can be opened."""
    with socket.create_server((ADDRESS, 0)) as listening:
        server, address = create_server(searchers, listening, top=top)
        announce(address)
        server.run([listening])


def create_server(searchers: Sequence[Searcher], listening: socket.socket, *, top: int) -> tuple[uvicorn.Server, str]:
    """And its whole address, with a new token."""
    token, port = secrets.token_urlsafe(24), listening.getsockname()[1]
    app = create_app(searchers, top=top, token=token, port=port)
    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off")
    return uvicorn.Server(config), f"http://{ADDRESS}:{port}/{token}/"
