"""`neuclip data convert`: writes any source as tar shards, which training reads fastest, and an index beside each.

Shards are in the webdataset layout. The same data always give the same bytes.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from neuclip.data.decoding import ending_by_content
from neuclip.data.locations import is_there, parts_of
from neuclip.data.open import CONVERSION
from neuclip.data.source import BadSample, Fault, Source, fingerprint
from neuclip.data.tar.index import load_index
from neuclip.errors import RunFailed, UserError
from neuclip.files import UNFINISHED, new_file, read_regular, reading, write_json, write_text
from neuclip.progress import track
from neuclip.records import append_lines, read_lines

SHARD_SIZE = 5000  # half a gigabyte of photos
SHARD_SAMPLES = 4000  # for data sets by name; another number would change their bytes under the same version
SKIPPED = "skipped.jsonl"

Member = tuple[str, bytes]  # extension and content
Entry = Sequence[Member]  # the members of one sample


def write_shards(folder: Path, samples: Iterable[Entry], shard_samples: int = SHARD_SAMPLES) -> int:
    """Write folder/00000.tar, 00001.tar ...; the key of sample i is i in eight digits. Returns the number of shards."""
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


def open_new_tar(path: Path | str) -> tarfile.TarFile:
    return tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)


def add_sample(tar: tarfile.TarFile, number: int, members: Entry) -> None:
    """Append a sample's members. TarInfo's defaults are right: time 0, user and group 0 without names, mode 0644."""
    for extension, content in members:
        member = tarfile.TarInfo(f"{number:08d}.{extension}")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


@dataclass(frozen=True)
class Converted:
    """The result of a conversion. Samples that could not be read are left out; the others keep their order. Images are
    copied without decoding them."""

    folder: Path
    samples: int
    shards: int
    skipped: Counter[str]  # by reason


def convert(source: Source, folder: Path, shard_size: int = SHARD_SIZE) -> Converted:
    """Write folder/00000.tar ... with `shard_size` samples each. After a kill, the same call continues.

    Nothing is overwritten: the folder must be new, empty, or left by an interrupted conversion of the same data.
    """
    if shard_size < 1:
        raise UserError(f"--shard-size {shard_size}: a shard has at least one sample; {SHARD_SIZE} is usual")
    _claim(folder, {**fingerprint(source)[0], "shard_size": shard_size})
    shards = -(-len(source) // shard_size)
    width = max(5, len(str(shards - 1)))
    paths = [folder / f"{number:0{width}d}.tar" for number in range(shards)]
    done = next((number for number, path in enumerate(paths) if not path.exists()), shards)
    first = done * shard_size
    _start_list(folder / SKIPPED, source.faults, first)
    ids = track(range(first, len(source)), "writing", len(source) - first, "samples")
    for path in paths[done:]:
        _write_shard(path, source, islice(ids, shard_size))
    return _summary(folder, paths, len(source))


def refuse_inside(address: str, folder: Path) -> None:
    """Raise UserError if the folder is inside the data: its shards would be read as data the next time."""
    target = folder.resolve()
    for part, _ in parts_of(address):
        if Path(part).is_dir() and target.is_relative_to(Path(part).resolve()):
            raise UserError(f"{folder}: is inside {part}, the data to convert; give a folder elsewhere")


def _claim(folder: Path, about: dict[str, Any]) -> None:
    """Create the folder and note in it what is converted. Raises UserError if it belongs to another conversion."""
    state = folder / CONVERSION
    if is_there(state):
        with reading(state, "give a new folder"):
            stored = json.loads(read_regular(state))
        if stored != about:
            raise UserError(
                f"{folder}: has shards of other data or of another --shard-size ({state}); give a new folder"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not an empty folder; give a new one, nothing is overwritten")
    write_json(state, about)


def _write_shard(path: Path, source: Source, ids: Iterable[int]) -> None:
    """Write a shard atomically, and append its unreadable samples to the list of skipped ones."""
    faults: list[Fault] = []
    with new_file(path) as file:
        with open_new_tar(file.name) as tar:
            for id in ids:
                try:
                    add_sample(tar, id, _read_members(source, id))
                except BadSample as bad:
                    faults.append(Fault(id, bad.reason, bad.where))
        append_lines(path.with_name(SKIPPED), [fault._asdict() for fault in faults])
    load_index(path)


def _read_members(source: Source, id: int) -> list[Member]:
    """The members of a sample: its image, and one caption as `txt` or several as a list in `json`."""
    sample = source[id]
    if not sample.image:
        raise BadSample("image is empty", source.where(id))
    # For other formats the ending does not matter: readers look at the content.
    members = [(ending_by_content(sample.image) or "jpg", sample.image)]
    if len(sample.captions) == 1:
        return [*members, ("txt", sample.captions[0].encode())]
    return [*members, ("json", json.dumps({"caption": sample.captions}, ensure_ascii=False).encode())]


def _start_list(skipped: Path, unindexed: Sequence[Fault], id: int) -> None:
    """Start the list of skipped samples with the faults that the source could not index, and the lines of samples
    before `id`. Later lines belong to a shard that a kill left unfinished, and will be written again."""
    with reading(skipped, "remove it and convert again"):
        kept = [record for record in read_lines(skipped) if 0 <= record["id"] < id]
    records = [*(fault._asdict() for fault in unindexed), *kept]
    if records or skipped.exists():
        write_text(skipped, "".join(json.dumps(record) + "\n" for record in records))


def _summary(folder: Path, paths: list[Path], expected: int) -> Converted:
    skipped: Counter[str] = Counter()
    for record in read_lines(folder / SKIPPED):
        skipped[record["reason"]] += record.get("times", 1)
    samples = sum(len(load_index(path).rows) for path in track(paths, "counting", len(paths), "shards"))
    for unfinished in folder.glob(f".*{UNFINISHED}"):  # left by kills
        unfinished.unlink(missing_ok=True)
    if samples == 0:
        reason, count = skipped.most_common(1)[0]
        raise RunFailed(
            f"{folder}: none of {expected:,} samples could be read, most often: {reason} ({count:,}); "
            f"all are listed in {folder / SKIPPED}; repair the data and convert them into a new folder"
        )
    return Converted(folder, samples, len(paths), skipped)
