"""Makes JPEG files that resemble photos, for measurements. Photos cannot be shipped, and flat or noisy images take
another time to decode.

An image is noise whose amplitude falls with frequency, in brightness and, weaker, in colour, with a few sharp-edged
areas and a little grain. Sides are 256 to 512 pixels; quality 95 and halved colour resolution are as in img2dataset.
The amplitude falls faster than in photos, whose detail is at edges, to reach the same size of 2.4 bits per pixel.
(CC12M at 256 pixels is 331 GB for 12.4 million images, 27 kB each: 2.4 bits per pixel at an aspect ratio of 4:3.)

Usage: python -m benchmarks.photo_like FOLDER [images] [images per shard]
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from neuclip.data.convert import write_shards

WORDS = (
    "a",
    "the",
    "red",
    "old",
    "wooden",
    "river",
    "dog",
    "child",
    "table",
    "bridge",
    "in",
    "on",
    "near",
    "with",
    "light",
)
SIDES = (256, 512)
FALL = 1.7  # amplitude ~ 1 / frequency ** FALL
GRAIN = 1.0
QUALITY = 95


def photo_like(number: int) -> bytes:
    """The JPEG of this number, which is always the same."""
    draw = np.random.default_rng(number)
    width, height = (int(side) for side in draw.integers(SIDES[0], SIDES[1] + 1, 2))
    bright, warm, green = (pink_noise(draw, height, width) for _ in range(3))
    pixels = 120 + 45 * bright[..., None] + np.stack([18 * warm, 12 * green, -18 * warm], axis=-1)
    pixels += areas(draw, height, width)
    pixels += draw.normal(0, GRAIN, (height, width, 1))
    stream = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(stream, "JPEG", quality=QUALITY, subsampling="4:2:0")
    return stream.getvalue()


def pink_noise(draw: np.random.Generator, height: int, width: int) -> np.ndarray:  # -> (height, width), variance 1
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = np.inf  # removes the mean
    spectrum = np.fft.rfft2(draw.normal(size=(height, width))) / frequency**FALL
    noise = np.fft.irfft2(spectrum, s=(height, width))
    return noise / noise.std()


def areas(draw: np.random.Generator, height: int, width: int) -> np.ndarray:  # -> (height, width, 3)
    """A few ellipses of different brightness and colour, because photos have edges."""
    canvas = Image.new("RGB", (width, height), (128, 128, 128))
    pen = ImageDraw.Draw(canvas)
    for _ in range(6):
        (x, y), (a, b) = draw.uniform(0, 1, 2) * (width, height), draw.uniform(0.05, 0.3, 2) * (width, height)
        pen.ellipse((x - a, y - b, x + a, y + b), fill=tuple(int(value) for value in draw.integers(70, 190, 3)))
    return np.asarray(canvas, dtype=np.float64) - 128


def caption(number: int) -> str:
    """A caption of seven to twenty words, for a realistic cost of tokenizing."""
    draw = np.random.default_rng(number)
    return " ".join(draw.choice(WORDS, int(draw.integers(7, 20))))


def write_photo_shards(folder: Path, images: int, per_shard: int) -> None:
    samples = ((("jpg", photo_like(number)), ("txt", caption(number).encode())) for number in range(images))
    write_shards(folder, samples, per_shard)


if __name__ == "__main__":
    folder, *counts = sys.argv[1:]
    write_photo_shards(Path(folder), *([int(count) for count in counts] + [2000, 250][len(counts) :]))
