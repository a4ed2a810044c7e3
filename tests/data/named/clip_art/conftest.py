"""Small Debian packages, put where `fetched` looks before it asks the network."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from PIL import Image

PutPackage = Callable[[str, Mapping[str, bytes]], None]


@pytest.fixture
def put_package(monkeypatch, tmp_path) -> PutPackage:
    """Writes a .deb of version 1.0-1 with these files into the cache's folder of packages."""
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "cache"))

    def put(name: str, files: Mapping[str, bytes]) -> None:
        target = tmp_path / "cache" / "packages" / f"{name}_1.0-1_all.deb"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(deb(files))

    return put


def deb(files: Mapping[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    archive = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0\n"), ("data.tar.xz", data.getvalue())):
        archive += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content
        archive += b"\n" * (len(content) % 2)
    return archive


@pytest.fixture
def encoded() -> Callable[..., bytes]:
    """A picture of one colour as a file's bytes: encoded("PNG", (30, 10), "red", "RGBA")."""

    def encode(kind: str, size: tuple[int, int], colour: object, mode: str = "RGB") -> bytes:
        buffer = io.BytesIO()
        Image.new(mode, size, colour).save(buffer, kind)
        return buffer.getvalue()

    return encode


@pytest.fixture
def drawing() -> Callable[..., bytes]:
    """An SVG document in the manner of the Open Clip Art Library: a square at x, y on a page."""

    def draw(
        title: str = "",
        author: str = "",
        tags: tuple[str, ...] = (),
        *,
        x: int = 0,
        colour: str = "red",
        body: str = "",
        licence: str = "http://web.resource.org/cc/PublicDomain",
    ) -> bytes:
        items = "".join(f"<rdf:li>{tag}</rdf:li>" for tag in tags)
        return f"""<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"
            xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:cc="http://web.resource.org/cc/"
            xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" width="100pt" height="100pt" viewBox="0 0 100 100">
            <metadata><rdf:RDF><cc:Work><dc:title>{title}</dc:title><dc:subject><rdf:Bag>{items}</rdf:Bag></dc:subject>
            <dc:creator><cc:Agent><dc:title>{author}</dc:title></cc:Agent></dc:creator>
            <cc:license rdf:resource="{licence}"/></cc:Work></rdf:RDF></metadata>
            <rect x="{x}" width="60" height="90" fill="{colour}"/>{body}</svg>""".encode()

    return draw


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def files_in() -> Callable[[Path], dict[str, bytes]]:
    return contents
