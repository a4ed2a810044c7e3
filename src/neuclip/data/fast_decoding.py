"""The faster, inexact way from bytes to pixels, for training: `data.pixels: fast`.

Images much larger than the smallest crop needs are decoded at a half, a quarter or an eighth of their size, which
JPEG allows for a fraction of the work. With simplejpeg (extra `fast`) JPEG files of other sizes go straight into an
array; it gives the same pixels as Pillow, which keeps four bytes per pixel and has to copy.
"""

from __future__ import annotations

import math

import numpy as np

from neuclip.data.transforms import MOST_PIXELS, decode

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

REDUCTION = 2  # the smallest crop of what is decoded stays at least so many times as large as the model's image


class FastDecode:
    """Bytes -> uint8 (H, W, 3), so large that of a square image the crop that keeps `smallest_crop` of the area has
    sides of at least twice `size`, unless the image itself is too small for that. Picklable.

    >>> FastDecode(224, smallest_crop=0.9)(photo_of_2000_by_1500).shape
    (750, 1000, 3)
    """

    def __init__(self, size: int, smallest_crop: float):
        self.side = math.ceil(REDUCTION * size / math.sqrt(smallest_crop))

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
