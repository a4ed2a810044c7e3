"""The faster, inexact way from bytes to pixels, for training: `data.pixels: fast`.

Pictures much larger than the model's are decoded at a half, a quarter or an eighth of their size, which JPEG allows
for a fraction of the work. With simplejpeg (extra `fast`) JPEG files of other sizes go straight into an array; it
gives the same pixels as Pillow, which keeps four bytes per pixel and has to copy.
"""

from __future__ import annotations

import numpy as np

from neuclip.data.transforms import MOST_PIXELS, decode

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

REDUCTION = 2  # what is decoded stays at least so many times as large as what is needed


class FastDecode:
    """Bytes -> uint8 (H, W, 3), H and W at least twice `size` unless the picture is smaller. Picklable.

    >>> FastDecode(224)(source[0].image).shape
    (448, 597, 3)
    """

    def __init__(self, size: int):
        self.side = REDUCTION * size

    def __call__(self, content: bytes) -> np.ndarray:
        """Raises BadSample, as `decode` does."""
        if self._is_plain_jpeg(content):
            try:
                return simplejpeg.decode_jpeg(content)
            except ValueError:  # damaged: Pillow says how, or reads it where it can
                pass
        return np.array(decode(content, reduce_to=self.side).convert("RGB"))

    def _is_plain_jpeg(self, content: bytes) -> bool:
        """Three colours, and too small to be reduced."""
        if simplejpeg is None or not content.startswith(b"\xff\xd8"):
            return False
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        except ValueError:
            return False
        return colours == "YCbCr" and min(height, width) < 2 * self.side and height * width <= MOST_PIXELS
