"""Decodes the bytes of an image to pixels. The transform that follows belongs to the model.

`decode` is exact: the same pixels as open_clip. `FastDecode` is faster, for training with `data.pixels: fast`.
"""

from __future__ import annotations

import math
import warnings
from io import BytesIO

import numpy as np
from PIL import Image

from neuclip.data.source import BadSample

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

# Endings of image files that are supported, and of those that are not.
DECODED = frozenset(
    ["png", "jpg", "jpeg", "jpe", "jfif", "webp", "bmp", "gif", "tif", "tiff", "avif", "jp2", "ppm", "ico"]
)
NOT_DECODED = frozenset(["heic", "heif", "jxl", "svg", "eps", "psd", "tga"])
NOT_DECODED_REASON = "image format is not supported"
IMAGE_SUFFIXES = tuple(f".{ending}" for ending in sorted(DECODED))

SIGNATURES = ((b"\x89PNG\r\n", "png"), (b"\xff\xd8\xff", "jpg"), (b"GIF8", "gif"))
MOST_PIXELS = 89_478_485  # a quarter of a gigabyte as RGB: above it Pillow warns, and we refuse
# The format is recognised by the first bytes, not by the name. Two kinds are left out: EPS, which would run Ghostscript
# on untrusted bytes, and formats without a signature (TGA), because a damaged file may pass as one and show noise.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "ICO", "JPEG2000", "AVIF")
STRIP_PIXELS = 1 << 20  # pixels that are scaled from 16 bits to 8 at a time
REDUCTION = 2  # the smallest crop of a reduced image has sides at least this many times those of the model's image


def ending_by_content(image: bytes) -> str:
    """The usual ending for the most common image formats, recognised by their first bytes; "" for others."""
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "webp"
    return next((ending for signature, ending in SIGNATURES if image.startswith(signature)), "")


def decode(content: bytes, where: str = "", *, reduce_to: int = 0) -> Image.Image:
    """Decode an image in its own mode (palette, CMYK, alpha). open_clip's transforms convert it to RGB; converting it
    earlier would give other pixels than open_clip. Of an animation, only the first frame is decoded; 16-bit grey is
    scaled to 8 bits. Raises BadSample.

    With `reduce_to`, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, with sides of at least `reduce_to`.

    >>> decode(source[0].image).convert("RGB")
    """
    if not content:
        raise BadSample("image is empty", where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one warning per image with damaged EXIF data would hide all other output
            image: Image.Image = Image.open(BytesIO(content), formats=FORMATS)
            if image.width * image.height > MOST_PIXELS:
                raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels")
            if reduce_to:
                image.draft(None, (reduce_to, reduce_to))
            image.load()
        # The conversion to RGB ignores a transparent colour, but warns about it, and fails if it is damaged.
        image.info.pop("transparency", None)
        return _to_eight_bits(image)
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        raise BadSample("image is too large", where) from error
    except Exception as error:  # Pillow's readers raise nearly every type on broken bytes
        reason = "image is cut off" if "truncated" in str(error) else "image does not decode"
        raise BadSample(reason, where) from error


def decode_rgb(content: bytes) -> Image.Image:
    """Decode an image and convert it to RGB before resizing, as is usual in evaluations: a palette cannot be
    interpolated, and the colours of transparent pixels are used."""
    return decode(content).convert("RGB")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit grey to 8 bits. Pillow's conversion to RGB would clip at 255: nearly every such image would be
    white."""
    if image.mode == "F":
        raise ValueError("pixels are floats, and no file says which value is white")
    if not image.mode.startswith("I"):
        return image
    # In strips: 90 million pixels as whole arrays of 64-bit numbers would take more than a gigabyte.
    scaled = Image.new("L", image.size)
    rows = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        grey = np.asarray(strip).clip(0, 65535).astype(np.uint32)
        scaled.paste(Image.fromarray(((grey * 255 + 32767) // 65535).astype(np.uint8)), (0, top))
    return scaled


class FastDecode:
    """Decodes bytes to uint8 (H, W, 3), inexactly: JPEGs much larger than the smallest crop needs are decoded at 1/2,
    1/4 or 1/8 of their size. With simplejpeg (extra `fast`), other JPEGs are decoded straight into an array, with the
    same pixels as Pillow.

    A crop of a square image with the share `smallest_crop` of its area has sides of at least twice `size`, unless the
    image itself is too small. Picklable.

    >>> FastDecode(224, smallest_crop=0.9)(photo_of_2000_by_1500).shape
    (750, 1000, 3)
    """

    def __init__(self, size: int, smallest_crop: float):
        self.side = math.ceil(REDUCTION * size / math.sqrt(smallest_crop))

    def __call__(self, content: bytes) -> np.ndarray:
        """Decode an image. Raises BadSample, as `decode` does."""
        if self._is_plain_jpeg(content):
            try:
                return simplejpeg.decode_jpeg(content)
            except ValueError:  # damaged: Pillow may still decode it, or gives the reason
                pass
        return np.array(decode(content, reduce_to=self.side).convert("RGB"))

    def _is_plain_jpeg(self, content: bytes) -> bool:
        """Whether it is a JPEG of three colours that is too small to be reduced."""
        if simplejpeg is None or not content.startswith(b"\xff\xd8"):
            return False
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        except ValueError:
            return False
        return colours == "YCbCr" and min(height, width) < 2 * self.side and height * width <= MOST_PIXELS
