"""Small data sets that the tests make for themselves: coloured shapes with their names, and images like photos."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

COLOURS = ("red", "green", "blue", "black", "orange", "purple", "brown", "pink")
SHAPES = ("circle", "square", "bar", "cross", "triangle", "ring")


def caption(number: int) -> str:
    return f"a {COLOURS[number % len(COLOURS)]} {SHAPES[number // len(COLOURS) % len(SHAPES)]}"


def image_bytes(number: int, size: int = 32) -> bytes:
    """The drawing of caption(number); its place and size differ from number to number."""
    image = Image.new("RGB", (size, size), "white")
    draw, ink = ImageDraw.Draw(image), COLOURS[number % len(COLOURS)]
    left, top = 2 + number * 7 % 9, 2 + number * 5 % 9
    box = (left, top, left + 16 + number % 4, top + 16 + number % 4)
    middle = ((box[0] + box[2]) // 2, (box[1] + box[3]) // 2)
    match SHAPES[number // len(COLOURS) % len(SHAPES)]:
        case "circle":
            draw.ellipse(box, fill=ink)
        case "square":
            draw.rectangle(box, fill=ink)
        case "bar":
            draw.rectangle((box[0], middle[1] - 3, box[2], middle[1] + 3), fill=ink)
        case "cross":
            draw.line((box[0], middle[1], box[2], middle[1]), fill=ink, width=4)
            draw.line((middle[0], box[1], middle[0], box[3]), fill=ink, width=4)
        case "triangle":
            draw.polygon([(box[0], box[3]), (box[2], box[3]), (middle[0], box[1])], fill=ink)
        case "ring":
            draw.ellipse(box, outline=ink, width=4)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def photo(number: int, size: tuple[int, int] = (60, 44)) -> bytes:
    """A JPEG like a photo: soft areas of colour with edges between them and grain over all."""
    draw = np.random.default_rng(number)
    areas = Image.fromarray(draw.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    grain = draw.normal(0, 6, (size[1], size[0], 3))
    pixels = np.asarray(areas, dtype=np.float64)
    pixels[:, size[0] * (number % 5 + 2) // 9 :] *= 0.7
    stream = io.BytesIO()
    Image.fromarray(np.clip(pixels + grain, 0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def write_shard(path: Path, numbers: Sequence[int], *, spoilt: Sequence[int] = ()) -> Path:
    """One tar of images and captions; the images of `spoilt` do not decode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = "w:gz" if path.suffix == ".gz" else "w"
    with tarfile.open(path, mode) as tar:
        for number in numbers:
            image = b"no image" if number in spoilt else image_bytes(number)
            for ending, content in (("png", image), ("txt", caption(number).encode())):
                member = tarfile.TarInfo(f"{number:06d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def write_shards(folder: Path, count: int, *, shards: int = 2, spoilt: Sequence[int] = ()) -> Path:
    """A folder of shards with samples 0..count-1."""
    for shard in range(shards):
        numbers = range(count * shard // shards, count * (shard + 1) // shards)
        write_shard(folder / f"{shard:05d}.tar", numbers, spoilt=spoilt)
    return folder


def write_csv(folder: Path, count: int) -> Path:
    """A CSV of paths and captions with samples 0..count-1."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", "title"])
        for number in range(count):
            (folder / f"{number:06d}.png").write_bytes(image_bytes(number))
            writer.writerow([f"{number:06d}.png", caption(number)])
    return folder / "pairs.csv"


TABLE_SIZE, BAD_IMAGE, NO_CAPTION = 40, 7, 20


def write_table(folder: Path) -> Path:
    """Images with one to three captions each; one does not decode, one has no caption."""
    lines = []
    for number in range(TABLE_SIZE):
        (folder / f"{number}.png").write_bytes(b"bad" if number == BAD_IMAGE else image_bytes(number))
        captions = [caption(number), f"{caption(number)} {number}", "a shape"][: 1 + number % 3]
        lines.append(json.dumps({"image": f"{number}.png", "caption": [] if number == NO_CAPTION else captions}))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder / "pairs.jsonl"
