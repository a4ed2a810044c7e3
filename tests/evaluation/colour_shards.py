"""Tar shards of one-colour images, with a caption or a label each."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from PIL import Image


def colour_image(colour: str, size: tuple[int, int] = (16, 16)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def write_samples(path: Path, samples: list[dict[str, bytes]]) -> Path:
    """One sample per dict: {"png": ..., "txt" or "cls": ...}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, members in enumerate(samples):
            for ending, content in members.items():
                member = tarfile.TarInfo(f"s{number:07d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path
