"""Writing tar shards in the webdataset layout, the same bytes every time."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

CONVERSION = "convert.json"  # what a folder of shards is converted from, written before the first shard
SHARD_SAMPLES = 4000  # of data sets by name; another number would give them other bytes under the same version

Member = tuple[str, bytes]  # extension and content
Entry = Sequence[Member]  # the members of one sample


def write_shards(folder: Path, samples: Iterable[Entry], shard_samples: int = SHARD_SAMPLES) -> int:
    """Write folder/00000.tar, 00001.tar ...: sample i has the key i in eight digits. Returns the number of shards."""
    folder.mkdir(parents=True, exist_ok=True)
    numbered = enumerate(samples)
    shards = 0
    while shard := list(islice(numbered, shard_samples)):
        write_tar(folder / f"{shards:05d}.tar", shard)
        shards += 1
    return shards


def write_tar(path: Path, samples: Iterable[tuple[int, Entry]]) -> None:
    with open_new_tar(path) as tar:
        for number, members in samples:
            add_sample(tar, number, members)


def open_new_tar(path: Path) -> tarfile.TarFile:
    return tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)


def add_sample(tar: tarfile.TarFile, number: int, members: Entry) -> None:
    """TarInfo's defaults are right: time 0, user and group 0 without names, mode 0644."""
    for extension, content in members:
        member = tarfile.TarInfo(f"{number:08d}.{extension}")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def shards_missing(folder: Path) -> int:
    """How many shards a conversion into this folder has still to write; 0 where none was begun."""
    try:
        begun = json.loads((folder / CONVERSION).read_bytes())
        expected = -(-begun["count"] // begun["shard_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return max(0, expected - sum(1 for _ in folder.glob("[0-9]*.tar")))
