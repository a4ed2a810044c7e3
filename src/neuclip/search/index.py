"""Features of a folder's images on disk, so that each image is embedded once by each model.

A folder in the cache, named by the model's weights, its transform and the searched folder. `features-*.f32` holds one
row per embedded image; `files.jsonl` says in its first line which features file counts, and then, image by image, which
row is whose. Rows are on disk before the lines that name them, and lines are only added: after an interruption what is
named is whole. A later line about the same path replaces an earlier one.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuclip.data.source import BadSample, Fault
from neuclip.errors import RunFailed
from neuclip.files import cache_folder, lock, write_text
from neuclip.machine import available_cores
from neuclip.models.towers import BuiltModel
from neuclip.progress import track
from neuclip.records import append_lines, read_lines
from neuclip.search.folder import ImageFile, SearchedFolder

BATCH = 64  # images per forward pass; what an interruption costs at most
FILES = "files.jsonl"
USED_SHARE = 0.5  # of the rows must be in use, or the features are written anew without the others


@dataclass(frozen=True)
class Index:
    """The features of a folder's images by one model. `row_of[id]` is an image's row, -1 if it could not be used."""

    features: np.ndarray  # (rows, d) float32, memory-mapped, rows of length 1
    row_of: np.ndarray  # (images,) int64
    faults: tuple[Fault, ...]

    @property
    def usable(self) -> int:
        return int((self.row_of >= 0).sum())

    def scores(self, query: np.ndarray) -> np.ndarray:  # (d,) -> (images,) cosine, -inf for images without features
        of_rows = np.append(self.features @ query, -np.inf)  # row -1 is the last
        return of_rows[self.row_of]


def open_index(built: BuiltModel, folder: SearchedFolder, name: str) -> Index:
    """Embeds what is new or changed in the folder, shows progress as `name`, and maps the features into memory."""
    place = cache_folder() / "search" / index_key(built, folder.path)
    place.mkdir(parents=True, exist_ok=True)
    with lock(place / "lock"):  # two processes take turns: the second finds what the first has made
        stored = StoredIndex(place, built.embed_dim)
        missing = [id for id, file in enumerate(folder.files) if file not in stored.entries]
        embed(built, folder, missing, stored, f"embedding {folder.path} with {name}")
        stored.compact(folder.files)
        features = stored.features()
    entries = [stored.entries[file] for file in folder.files]
    faults = tuple(
        Fault(id, entry["fault"], str(folder.path / folder.files[id].path))
        for id, entry in enumerate(entries)
        if entry["row"] < 0
    )
    return Index(features, np.array([entry["row"] for entry in entries], dtype=np.int64), (*folder.not_read, *faults))


def index_key(built: BuiltModel, folder: Path) -> str:
    """Of the model's weights and transform, and of the folder."""
    digest = hashlib.blake2b(f"{built.float_transform}\n{built.config}\n".encode(), digest_size=16)
    digest.update(os.fsencode(folder.resolve()))  # which need not be UTF-8
    for name, tensor in built.towers.model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


class StoredIndex:
    """The two files. `entries[file]` is {"row": 7}, or {"row": -1, "fault": why} for an image that cannot be used."""

    def __init__(self, place: Path, width: int):
        self.place, self.width = place, width
        self.entries: dict[ImageFile, dict[str, Any]] = {}
        lines = self._lines()
        if not lines:
            self._begin([])
            return
        self.file = place / str(lines[0]["features"])
        self.rows = self.file.stat().st_size // (4 * width)
        for line in lines[1:]:
            self._add(line)
        self.rows = max((entry["row"] for entry in self.entries.values()), default=-1) + 1
        os.truncate(self.file, self.rows * 4 * width)  # rows that no line names are of an interrupted batch
        # A line that an interruption cut off must not run into the next.
        write_text(place / FILES, "".join(json.dumps(line) + "\n" for line in lines))

    def _lines(self) -> list[dict[str, Any]]:
        """None at all if a file is missing or damaged: the index is made again."""
        try:
            lines = read_lines(self.place / FILES)
            whole = bool(lines) and lines[0]["width"] == self.width and (self.place / lines[0]["features"]).is_file()
            return lines if whole else []
        except (ValueError, KeyError, TypeError):
            return []

    def _add(self, line: dict[str, Any]) -> None:
        if line["row"] < self.rows:
            self.entries[ImageFile(line["path"], line["size"], line["mtime_ns"])] = line

    def _begin(self, lines: list[dict[str, Any]], features: np.ndarray | None = None) -> None:
        """A features file of its own, then, in one move, the list that names it."""
        self.file = self.place / f"features-{uuid.uuid4().hex}.f32"
        content = np.empty((0, self.width), np.float32) if features is None else features
        with self.file.open("wb") as file:
            content.tofile(file)
            os.fsync(file.fileno())
        header = {"features": self.file.name, "width": self.width}
        write_text(self.place / FILES, "".join(json.dumps(line) + "\n" for line in [header, *lines]))
        for other in self.place.glob("features-*.f32"):
            if other != self.file:
                other.unlink()
        self.rows = len(content)
        self.entries = {}
        for line in lines:
            self._add(line)

    def append(self, files: list[ImageFile], features: Tensor, faults: list[str]) -> None:
        """`faults[i]` says why files[i] cannot be used; "" where it has the next row of `features` (n, d)."""
        with self.file.open("ab") as file:
            features.numpy().tofile(file)
            os.fsync(file.fileno())
        lines = []
        for image, fault in zip(files, faults, strict=True):
            lines.append(image._asdict() | ({"row": -1, "fault": fault} if fault else {"row": self.rows}))
            self.rows += not fault
        append_lines(self.place / FILES, lines)
        for line in lines:
            self._add(line)

    def compact(self, files: tuple[ImageFile, ...]) -> None:
        """Forgets images that are gone or changed, once they are more than those that are there."""
        kept = [self.entries[file] for file in files]
        used = [line["row"] for line in kept if line["row"] >= 0]
        if len(used) >= USED_SHARE * self.rows:
            return
        features = np.array(self.features()[used])
        new_rows = {row: number for number, row in enumerate(used)}
        self._begin([line | {"row": new_rows.get(line["row"], -1)} for line in kept], features)

    def features(self) -> np.ndarray:  # (rows, d)
        if not self.rows:  # nothing can be mapped
            return np.empty((0, self.width), np.float32)
        return np.memmap(self.file, np.float32, "r", shape=(self.rows, self.width))


@torch.no_grad()
def embed(built: BuiltModel, folder: SearchedFolder, ids: list[int], stored: StoredIndex, what: str) -> None:
    """Batch by batch: threads read and decode the next images (Pillow runs beside Python) while the model encodes."""
    towers = built.towers.eval()

    def prepare(id: int) -> Tensor | str:
        try:
            return folder.pixels(id, built.transform)
        except BadSample as bad:
            return bad.reason

    batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
    with ThreadPoolExecutor(available_cores()) as pool:
        try:
            ahead = [pool.submit(prepare, id) for batch in batches[:1] for id in batch]
            for number, batch in enumerate(track(batches, what, len(batches), "batches")):
                prepared = [future.result() for future in ahead]
                ahead = [pool.submit(prepare, id) for following in batches[number + 1 : number + 2] for id in following]
                images = [one for one in prepared if not isinstance(one, str)]
                features = torch.empty(0, built.embed_dim)
                if images:
                    features = towers.encode_image(torch.stack(images).to(towers.device)).float().cpu()
                if not features.isfinite().all():
                    raise RunFailed(f"{what}: features are not finite; the model's weights are broken, use another one")
                faults = [one if isinstance(one, str) else "" for one in prepared]
                stored.append([folder.files[id] for id in batch], features, faults)
        finally:
            pool.shutdown(cancel_futures=True)
