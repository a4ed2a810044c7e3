"""Images as PNG files, the same bytes every time."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def encode_png(pixels: np.ndarray) -> bytes:
    """PNG without metadata: the same pixels give the same bytes."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=False, compress_level=6)
    return buffer.getvalue()
