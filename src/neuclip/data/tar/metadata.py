"""Numbers beside each image of a shard: its `npy` member, one vector of whole numbers (region, year, hospital ...)."""

from __future__ import annotations

import io
import mmap
from itertools import islice
from pathlib import Path

import numpy as np

from neuclip.data.tar.source import TarSource
from neuclip.data.tar.walk import BLOCK, members
from neuclip.errors import UserError

FIRST_MEMBERS = 100  # of a shard, of which one is a vector if there are any
MOST_BYTES = 1 << 16  # of a vector of a few numbers and its header
REMEDY = "each image needs one vector of whole numbers, all equally long"


def read_metadata(source: TarSource) -> np.ndarray | None:
    """(n, columns) int64, the row of every id; None if no sample has a vector. No image is read.

    Vector and image belong together by the name of the sample in its shard, in whatever order the members come.
    """
    if not any(map(_has_vectors, source.paths)):
        return None
    starts = [0, *source.joined.ends.tolist()]
    contents: list[bytes] = []
    for shard, path in enumerate(source.paths):
        blocks = source.joined.rows["image_block"][starts[shard] : starts[shard + 1]]
        contents += _members_of_shard(path, blocks.tolist())
    start = next((id for id, content in enumerate(contents) if content), None)
    if start is None:  # those that are there belong to no image
        return None
    first = _vector(source, start, contents[start])
    size, header = len(contents[start]), contents[start][: -first.nbytes]
    if header.endswith(b"\n") and all(len(one) == size and one.startswith(header) for one in contents):
        numbers = b"".join(content[len(header) :] for content in contents)  # one by one takes 0.1 ms each
        return np.frombuffer(numbers, first.dtype).reshape(len(contents), len(first)).astype(np.int64)
    return np.stack([_vector(source, id, content, len(first)) for id, content in enumerate(contents)]).astype(np.int64)


def _has_vectors(path: Path) -> bool:
    """Whether there is one among the first members: walking through all is for sets that have them."""
    if path.stat().st_size == 0:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return any(name.lower().endswith(b".npy") for name, _, _ in islice(members(data, []), FIRST_MEMBERS))


def _members_of_shard(path: Path, blocks: list[int]) -> list[bytes]:
    """The `npy` member beside each image, given by the block where it begins; empty where there is none."""
    if not blocks:
        return []
    by_key: dict[bytes, bytes] = {}
    keys: dict[int, bytes] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for member, offset, size in members(data, []):
            key, _, ending = member.rpartition(b".")
            if ending.lower() == b"npy":
                by_key[key] = data[offset : offset + min(size, MOST_BYTES)]
            else:
                keys[offset // BLOCK] = key
    return [by_key.get(keys.get(block, b""), b"") for block in blocks]


def _vector(source: TarSource, id: int, content: bytes, columns: int = 0) -> np.ndarray:
    """One sample's; UserError unless it is as long as the others. Pickled objects are refused: reading them would run
    what they say."""
    if not content:
        raise UserError(f"{source.where(id)}: has no npy member, others have {columns} numbers in one; {REMEDY}")
    where = f"{source.where(id).rpartition('.')[0]}.npy"
    try:
        vector = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{where}: is not a whole array of numbers ({error}); {REMEDY}") from error
    if vector.ndim != 1 or vector.dtype.kind not in "iu" or not len(vector):
        raise UserError(f"{where}: has shape {vector.shape} and type {vector.dtype}; {REMEDY}")
    if columns and len(vector) != columns:
        raise UserError(f"{where}: has {len(vector)} numbers, others have {columns}; {REMEDY}")
    return vector
