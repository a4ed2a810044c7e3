"""From the bytes of an image to what a transform takes. The transform itself is handed in: it belongs to the model."""

from __future__ import annotations

import warnings
from io import BytesIO

import numpy as np
from PIL import Image

from neuclip.data.sample import BadSample

MOST_PIXELS = 89_478_485  # a quarter of a gigabyte as RGB: Pillow's own mark, but here it is a limit
# What a file is, its first bytes say, not its name. Left out are EPS, which would start Ghostscript on bytes from
# anywhere, and kinds without a signature (TGA), as which a damaged file may pass and show noise.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "ICO", "JPEG2000", "AVIF")


def decode(content: bytes, where: str = "", *, reduce_to: int = 0) -> Image.Image:
    """The whole image in its own mode (palette, CMYK, alpha): open_clip's transforms convert to RGB themselves,
    and only so do pixels equal open_clip's. Of an animation the first frame; 16-bit grey scaled to 8. Raises BadSample.

    With `reduce_to` a JPEG may come at 1/2, 1/4 or 1/8 of its size, its sides no shorter than that.

    >>> decode(source[0].image).convert("RGB")
    """
    if not content:
        raise BadSample("image is empty", where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one per image with damaged EXIF data would bury everything else
            image: Image.Image = Image.open(BytesIO(content), formats=FORMATS)
            if image.width * image.height > MOST_PIXELS:
                raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels")
            if reduce_to:
                image.draft(None, (reduce_to, reduce_to))
            image.load()
        return _eight_bits(_opaque(image))
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        raise BadSample("image is too large", where) from error
    except Exception as error:  # Pillow's readers raise nearly every type on broken bytes
        reason = "image is cut off" if "truncated" in str(error) else "image does not decode"
        raise BadSample(reason, where) from error


def _opaque(image: Image.Image) -> Image.Image:
    """Without the note of a transparent colour: the conversion to RGB ignores it, but warns of it, or fails where it is
    damaged."""
    image.info.pop("transparency", None)
    return image


def _eight_bits(image: Image.Image) -> Image.Image:
    """Pillow's conversion of 16-bit grey to RGB clips at 255, which turns nearly every such image white."""
    if image.mode == "F":
        raise ValueError("pixels are floats, and no file says which of them is white")
    if not image.mode.startswith("I"):
        return image
    grey = np.asarray(image).astype(np.int64).clip(0, 65535)
    return Image.fromarray(((grey * 255 + 32767) // 65535).astype(np.uint8))
