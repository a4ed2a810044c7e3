"""What is called an image, and what its first bytes call it."""

from __future__ import annotations

# Endings of what data/transforms.py decodes, and of kinds of images that it does not.
READ = frozenset(
    ["png", "jpg", "jpeg", "jpe", "jfif", "webp", "bmp", "gif", "tif", "tiff", "avif", "jp2", "ppm", "ico"]
)
UNREAD = frozenset(["heic", "heif", "jxl", "svg", "eps", "psd", "tga"])
UNREAD_KIND = "kind of image is not read"  # the reason of such a fault

ENDINGS = tuple(f".{ending}" for ending in sorted(READ))  # for str.endswith
BEGINNINGS = ((b"\x89PNG\r\n", "png"), (b"\xff\xd8\xff", "jpg"), (b"GIF8", "gif"))
LOOKED_AT = 12  # bytes


def ending_by_content(image: bytes) -> str:
    """Of the kinds that nearly all images are, told by the first LOOKED_AT bytes; "" for others."""
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "webp"
    return next((ending for beginning, ending in BEGINNINGS if image.startswith(beginning)), "")
