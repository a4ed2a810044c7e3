"""Images as text within a table: base64, with or without `data:image/png;base64,` in front."""

from __future__ import annotations

import base64
import binascii

from neuclip.data.sample import BadSample

BEGINNINGS = (b"/9j/", b"iVBOR", b"R0lGOD", b"UklGR")  # of JPEG, PNG, GIF and WebP in base64
SHORTEST = 32  # letters; the smallest GIF there is has 35 bytes


def is_inline(field: bytes) -> bool:
    """Whether a field is an image rather than the path of one. `/9j/` might begin a path, whose name would end in a
    dot and its kind; base64 has no dots."""
    if field.startswith(b"data:image/"):
        return b";base64," in field[:100]
    return field.startswith(BEGINNINGS) and len(field) >= SHORTEST and b"." not in field


def inline_image(field: bytes, where: str) -> bytes:
    """The image's bytes. Raises BadSample."""
    _, _, text = field.rpartition(b",")  # which base64 has none of
    try:
        return base64.b64decode(b"".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise BadSample("image is not whole base64", where) from None
