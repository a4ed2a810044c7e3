"""The comparison's data at the size its model sees: each image shrunk once instead of in every run and epoch.

Decoding and shrinking a 64-pixel PNG costs as much as a training step of the nano model. The shorter side becomes
`PIXELS`, as open_clip's evaluation transform does it, and is stored without compression, so that evaluation sees equal
pixels and only the training crops are cut from the smaller image.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from PIL import Image

from neuclip.data.convert import Entry, write_shards
from neuclip.data.decoding import decode
from neuclip.data.open import open_source
from neuclip.data.source import Source
from neuclip.progress import track

PIXELS = 32


def shrunk(address: str, folder: Path) -> Path:
    """The data at `address` with small images, in `folder`; made by the first call."""
    if not folder.exists():
        unfinished = folder.with_name(f".{folder.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_shards(unfinished, small_pairs(open_source(address)))
        unfinished.rename(folder)
    return folder


def small_pairs(source: Source) -> Iterator[Entry]:
    for id in track(range(len(source)), f"shrinking {source.name}", len(source), "images"):
        sample = source[id]
        yield ("bmp", small(decode(sample.image))), ("txt", sample.captions[0].encode())


def small(image: Image.Image) -> bytes:
    """The image as an uncompressed BMP whose shorter side has `PIXELS` pixels, the longer one cut to whole ones."""
    width, height = image.size
    short = min(width, height)
    resized = image.convert("RGB").resize((PIXELS * width // short, PIXELS * height // short), Image.Resampling.BICUBIC)
    content = BytesIO()
    resized.save(content, format="BMP")
    return content.getvalue()
