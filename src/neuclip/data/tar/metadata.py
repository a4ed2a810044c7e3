"""Numbers beside each image of a shard: its `npy` member, one vector of whole numbers (region, year, hospital ...)."""

from __future__ import annotations

import io
import mmap
from pathlib import Path

import numpy as np

from neuclip.data.tar.source import TarSource
from neuclip.data.tar.walk import BLOCK, members
from neuclip.errors import UserError

MOST_BYTES = 1 << 16  # of a vector of a few numbers and its header
REMEDY = "each image needs one vector of whole numbers, all equally long"


def read_metadata(source: TarSource) -> np.ndarray | None:
    """(n, columns) int64, the row of every id; None if no sample has a vector. No image is read.

    Vector and image belong together by the name of the sample in its shard, in whatever order the members come.
    """
    vectors: list[np.ndarray] = []
    starts = [0, *source.joined.ends.tolist()]
    for shard, path in enumerate(source.paths):
        blocks = source.joined.rows["image_block"][starts[shard] : starts[shard + 1]]
        vectors += _vectors_of_shard(path, source.shards[shard], blocks.tolist())
    if not any(len(vector) for vector in vectors):
        return None
    columns = len(next(vector for vector in vectors if len(vector)))
    for id, vector in enumerate(vectors):
        if len(vector) != columns:
            lacks = f"its npy member has {len(vector)} numbers" if len(vector) else "has no npy member"
            raise UserError(f"{source.where(id)}: {lacks}, others have {columns}; {REMEDY}")
    return np.stack(vectors)


def _vectors_of_shard(path: Path, name: str, blocks: list[int]) -> list[np.ndarray]:
    """Of each image, given by the block where it begins; an empty one where its sample has no `npy` member."""
    if not blocks:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        by_key: dict[bytes, np.ndarray] = {}
        keys: dict[int, bytes] = {}
        for member, offset, size in members(data, []):
            key, _, ending = member.rpartition(b".")
            keys[offset // BLOCK] = key
            if ending.lower() == b"npy":
                where = f"{name}: {member.decode(errors='backslashreplace')}"
                by_key[key] = _vector(data[offset : offset + min(size, MOST_BYTES)], where)
    nothing = np.zeros(0, dtype=np.int64)
    return [by_key.get(keys[block], nothing) for block in blocks]


def _vector(content: bytes, where: str) -> np.ndarray:
    """Pickled objects are refused: reading them would run what they say."""
    try:
        vector = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{where}: is not a whole array of numbers ({error}); {REMEDY}") from error
    if vector.ndim != 1 or vector.dtype.kind not in "iub" or not len(vector):
        raise UserError(f"{where}: has shape {vector.shape} and type {vector.dtype}; {REMEDY}")
    return vector.astype(np.int64)
