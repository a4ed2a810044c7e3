"""The index of a folder: the features of its images by one model, and search by text or by image.

Features are stored in the cache folder, one .npz file per model and folder, so that each image is embedded once. The
zip format has checksums: a damaged file is detected, and the images are embedded again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from neuclip.data.decoding import NOT_DECODED_REASON, decode
from neuclip.data.source import BadSample
from neuclip.data.tables.folder import list_images
from neuclip.data.tables.listed import read_image_file
from neuclip.errors import RunFailed, UserError
from neuclip.files import UNFINISHED, cache_folder, new_file, open_regular, remove_unused
from neuclip.machine import available_cores
from neuclip.models.build import BuiltModel
from neuclip.progress import track

BATCH = 64  # images per forward pass
SAVE_SECONDS = 60.0  # between saves: work that a kill can lose
LENGTH_TOLERANCE = 0.01  # stored features have length 1, except for rounding


class ImageFile(NamedTuple):
    """Identifies a version of an image. If path, size and time are unchanged, the image is taken to be unchanged."""

    path: str  # relative to the folder
    size: int
    mtime_ns: int


class Match(NamedTuple):
    """An image of the folder and the cosine between its features and the query's."""

    id: int
    path: str  # relative to the folder
    score: float


# For each image its features (d,) of length 1, or the reason why it cannot be used.
Index = dict[ImageFile, np.ndarray | str]


@dataclass(frozen=True)
class Folder:
    """The images of a folder, listed once: an image's id is its index in the sorted list `files`.

    >>> Folder.open(Path("photos")).files[0].path                                          # doctest: +SKIP
    '2024/beach.jpg'
    """

    path: Path
    files: tuple[ImageFile, ...]
    not_decoded: tuple[str, ...] = ()  # paths of images in formats that are not supported, relative to the folder

    @classmethod
    def open(cls, path: Path) -> Folder:
        images, _, others = list_images(path)
        if not images:
            raise UserError(f"{path} and its subfolders contain no images; give a folder of JPEG, PNG or WebP files")
        files = []
        for image in images:
            try:
                status = (path / image).stat()
            except OSError:  # a broken link, or just removed: reading it will fail with a reason
                files.append(ImageFile(image, -1, -1))
            else:
                files.append(ImageFile(image, status.st_size, status.st_mtime_ns))
        return cls(path, tuple(files), tuple(others))

    def read(self, id: int, *, reduce_to: int = 0) -> Any:
        """The decoded image; `reduce_to` is passed to `decode`. Raises BadSample."""
        path = self.path / self.files[id].path
        return decode(read_image_file(path, str(path)), str(path), reduce_to=reduce_to)


@dataclass(frozen=True)
class Searcher:
    """Searches one folder with one model: for a text or an image, returns the nearest images, best first.

    >>> searcher = Searcher.open("first", built, Folder.open(Path("photos")))              # doctest: +SKIP
    >>> searcher.by_text("a dog", top=10)[0].path                                          # doctest: +SKIP
    'rex.jpg'
    """

    name: str
    built: BuiltModel
    folder: Folder
    ids: np.ndarray  # (n,) the images that can be used, ascending
    features: np.ndarray  # (n, d) float32, rows of length 1
    faults: dict[str, str]  # path relative to the folder: reason why the image cannot be used

    @classmethod
    def open(cls, name: str, built: BuiltModel, folder: Folder) -> Searcher:
        """Embed the new and changed images of the folder, with a progress line that shows `name`."""
        built.towers.eval()
        index = update_index(built, folder, f"embedding {folder.path} with {name}")
        rows, faults = rows_of(index), {file.path: reason for file, reason in index.items() if isinstance(reason, str)}
        ids = [id for id, file in enumerate(folder.files) if file in rows]
        features = stack([rows[folder.files[id]] for id in ids], built.embed_dim)
        not_decoded = dict.fromkeys(folder.not_decoded, NOT_DECODED_REASON)
        return cls(name, built, folder, np.array(ids, np.int64), features, not_decoded | faults)

    @torch.no_grad()
    def by_text(self, text: str, top: int) -> list[Match]:
        if not text.strip():
            raise UserError("the query is empty; give some words, or an image")
        text = text.encode(errors="replace").decode()  # tokenizers fail on lone surrogates
        tokens = self.built.tokenize([text]).to(self.built.towers.device)
        return self._nearest(self.built.towers.encode_text(tokens), top)

    @torch.no_grad()
    def by_image(self, image: Any, top: int) -> list[Match]:
        """The images nearest to `image`, an image that `decode` returned. Raises BadSample."""
        pixels = transform(self.built, image)[None].to(self.built.towers.device)
        return self._nearest(self.built.towers.encode_image(pixels), top)

    def _nearest(self, query: Tensor, top: int) -> list[Match]:  # (1, d)
        scores = self.features @ query[0].float().cpu().numpy()
        best = np.argsort(-scores, kind="stable")[:top]  # stable: equal scores are sorted by path
        pairs = zip(self.ids[best].tolist(), scores[best].tolist(), strict=True)
        return [Match(id, self.folder.files[id].path, score) for id, score in pairs]


def update_index(built: BuiltModel, folder: Folder, what: str) -> Index:
    """The index of the folder's files: reads the stored index, embeds new and changed files, removes files that are
    gone, and stores the result."""
    path = cache_folder() / "search" / f"{index_key(built, folder.path)}.npz"
    stored = load(path, built.embed_dim)
    index = {file: stored[file] for file in folder.files if file in stored}
    missing = [id for id, file in enumerate(folder.files) if file not in index]
    saved = time.monotonic()
    try:
        for batch in embed(built, folder, missing, what):
            index |= batch
            if time.monotonic() - saved > SAVE_SECONDS:
                save(path, index, built.embed_dim)
                saved = time.monotonic()
    finally:  # after Ctrl-C, too: the next search continues from here
        if missing or len(index) < len(stored):
            save(path, index, built.embed_dim)
    return index


def index_key(built: BuiltModel, folder: Path) -> str:
    """A digest of the model's weights, config and transform, and of the folder's path."""
    digest = hashlib.blake2b(f"{built.float_transform}\n{built.config}\n".encode(), digest_size=16)
    digest.update(os.fsencode(folder.resolve()))  # a path need not be UTF-8
    digest.update(built.towers.weights_sha256().encode())
    return digest.hexdigest()


def load(path: Path, width: int) -> Index:
    """The stored index; empty if the file is missing or damaged in any way."""
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as stored:
            features, (files, faults) = stored["features"], json.loads(stored["files"].tobytes())
        lengths = np.sqrt(np.einsum("nd,nd->n", features, features))
        if features.shape[1] == width and (abs(lengths - 1) < LENGTH_TOLERANCE).all():
            pairs = [*zip(files, features, strict=True), *((file, str(reason)) for file, reason in faults)]
            return {ImageFile(*file): row for file, row in pairs}
    except Exception:  # a damaged file can raise nearly every type of error
        pass
    return {}


def save(path: Path, index: Index, width: int) -> None:
    """Write the index: `features`, and `files` with the files of its rows and the files with faults. `files` is JSON,
    because JSON can store names that are not valid UTF-8."""
    rows = rows_of(index)
    files = json.dumps([list(rows), [pair for pair in index.items() if isinstance(pair[1], str)]]).encode()
    with new_file(path) as file:
        np.savez(file, features=stack([*rows.values()], width), files=np.frombuffer(files, np.uint8))
    remove_unused(path.parent.glob(f".*{UNFINISHED}"))  # leftovers of kills


def rows_of(index: Index) -> dict[ImageFile, np.ndarray]:
    return {file: row for file, row in index.items() if not isinstance(row, str)}


def stack(rows: list[np.ndarray], width: int) -> np.ndarray:  # n x (d,) -> (n, d), also for n = 0
    return np.array(rows, np.float32).reshape(-1, width)


def transform(built: BuiltModel, image: Any) -> Tensor:  # -> (3, H, W)
    """The input of the model's image encoder. Raises BadSample."""
    try:
        return built.transform(image)
    except (ValueError, OSError, ZeroDivisionError) as error:  # an image one pixel wide, for example
        raise BadSample("image cannot be transformed", str(error)) from error


@torch.no_grad()
def embed(built: BuiltModel, folder: Folder, ids: list[int], what: str) -> Iterator[Index]:
    """Yield the index entries of each batch. Threads read and decode the next images while the model encodes (Pillow
    releases the interpreter's lock)."""
    batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
    pool = ThreadPoolExecutor(available_cores())

    def prepare(id: int) -> Tensor | str:
        try:
            return transform(built, folder.read(id))
        except BadSample as bad:
            return bad.reason

    def start(batch: list[int]) -> dict[ImageFile, Future[Tensor | str]]:
        return {folder.files[id]: pool.submit(prepare, id) for id in batch}

    try:
        started = start(ids[:BATCH])
        for _, following in track(pairwise([*batches, []]), what, len(ids), "images", step=BATCH):
            prepared = {file: future.result() for file, future in started.items()}
            started = start(following)
            images = {file: pixels for file, pixels in prepared.items() if not isinstance(pixels, str)}
            rows = encode(built, [*images.values()], what)
            faults = {file: reason for file, reason in prepared.items() if isinstance(reason, str)}
            yield {**dict(zip(images, rows, strict=True)), **faults}
    finally:
        pool.shutdown(cancel_futures=True)


def encode(built: BuiltModel, images: list[Tensor], what: str) -> np.ndarray:  # n x (3, H, W) -> (n, d)
    if not images:
        return stack([], built.embed_dim)
    features = built.towers.encode_image(torch.stack(images).to(built.towers.device)).float().cpu()
    if not features.isfinite().all():
        raise RunFailed(f"{what}: features are not finite; the model's weights are broken, use another model")
    return features.numpy()
