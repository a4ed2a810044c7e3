"""From the bytes of a picture to what a transform takes. The transform itself is handed in: it belongs to the model."""

from __future__ import annotations

import warnings
from io import BytesIO

import numpy as np
from PIL import Image

from neuclip.data.sample import BadSample


def decode(content: bytes, where: str = "") -> Image.Image:
    """The whole picture in its own mode (palette, CMYK, alpha): open_clip's transforms convert to RGB themselves,
    and only so do pixels equal open_clip's. Raises BadSample."""
    if not content:
        raise BadSample("picture is empty", where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(content))
        image.load()
        return _eight_bits(image)
    except MemoryError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadSample("picture is too large", where) from error
    except Exception as error:  # Pillow's readers raise nearly every type on broken bytes
        reason = "picture is cut off" if "truncated" in str(error) else "picture does not decode"
        raise BadSample(reason, where) from error


def _eight_bits(image: Image.Image) -> Image.Image:
    """Pillow's conversion of 16-bit grey to RGB clips at 255, which turns nearly every such picture white."""
    if not image.mode.startswith("I"):
        return image
    grey = np.asarray(image).astype(np.int64).clip(0, 65535)
    return Image.fromarray(((grey * 255 + 32767) // 65535).astype(np.uint8))
