"""Shards that a test makes for itself: small images of noise, each with its number as caption."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

EXTENSIONS = ("png", "jpg", "webp")


Member = tuple[str, bytes]


def image_bytes(number: int, extension: str = "png", size: tuple[int, int] = (12, 10)) -> bytes:
    """A small gradient with noise, different for every number."""
    draw = np.random.default_rng(number)
    pixels = np.linspace(0, 200, size[0] * size[1] * 3).reshape(size[1], size[0], 3) + draw.integers(
        0, 50, (size[1], size[0], 3)
    )
    stream = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(stream, {"jpg": "JPEG"}.get(extension, extension.upper()))
    return stream.getvalue()


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def png(width: int, height: int, bits: int, kind: int, rows: bytes) -> bytes:
    """A PNG by hand: Pillow reads 16 bits per channel and sizes that no memory holds, but writes neither."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)), (b"IDAT", zlib.compress(rows))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in [*chunks, (b"IEND", b"")]
    )


def pair(number: int) -> list[Member]:
    extension = EXTENSIONS[number % 3]
    return [
        (f"{number:05d}.{extension}", image_bytes(number, extension)),
        (f"{number:05d}.txt", f"image {number}".encode()),
    ]


def write_tar(path: Path, members: list[Member], form: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            information = tarfile.TarInfo(name)
            information.size = len(content)
            tar.addfile(information, io.BytesIO(content))
    return path


def write_shards(folder: Path, sizes: list[int]) -> Path:
    """Shards of the given numbers of pairs; pair k is named and drawn after k."""
    first = 0
    for shard, size in enumerate(sizes):
        write_tar(
            folder / f"{shard:05d}.tar", [member for number in range(first, first + size) for member in pair(number)]
        )
        first += size
    return folder


def contents(source) -> list[tuple[bytes, tuple[str, ...]]]:
    return [(sample.image, sample.captions) for sample in (source[id] for id in range(len(source)))]
