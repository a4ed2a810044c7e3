"""Any source written as tar shards: the form that training reads fastest, with the index beside each shard."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from neuclip.data.decoding import ending_by_content
from neuclip.data.fingerprint import fingerprint
from neuclip.data.locations import parts_of
from neuclip.data.sample import BadSample, Fault, Sample
from neuclip.data.source import Source
from neuclip.data.tar.index import index_of
from neuclip.data.tar.writing import CONVERSION, Entry, write_tar
from neuclip.errors import RunFailed, UserError
from neuclip.progress import track
from neuclip.records import append_line, read_lines, write_json, write_text_safely

SHARD_SIZE = 5000  # half a gigabyte of photos; unlike that of built-in sets it may change, it is kept in CONVERSION
SKIPPED = "skipped.jsonl"


@dataclass(frozen=True)
class Converted:
    """What was written. Samples that could not be read are left out; the others keep their order. Images are copied
    and not decoded: those that will not decode are found when they are read."""

    folder: Path
    samples: int
    shards: int
    skipped: Counter[str]  # by reason


def convert(source: Source, folder: Path, shard_size: int = SHARD_SIZE) -> Converted:
    """Write folder/00000.tar ... with `shard_size` samples each. Called again after a kill, it goes on where it was.

    Nothing that lies in the folder is overwritten: it must be new, empty, or left by a conversion of the same data.
    """
    if shard_size < 1:
        raise UserError(f"--shard-size {shard_size}: a shard holds at least one sample; {SHARD_SIZE} is usual")
    _claim(folder, {**fingerprint(source), "shard_size": shard_size})
    shards = -(-len(source) // shard_size)
    width = max(5, len(str(shards - 1)))
    paths = [folder / f"{number:0{width}d}.tar" for number in range(shards)]
    done = next((number for number, path in enumerate(paths) if not path.exists()), shards)
    _begin_list(folder / SKIPPED, source.faults, done * shard_size)
    labels = source.labels()
    ids = track(range(done * shard_size, len(source)), "writing", len(source) - done * shard_size, "samples")
    for path in paths[done:]:
        faults: list[Fault] = []
        _write_shard(path, _samples(source, labels, islice(ids, shard_size), faults), faults)
    return _checked(folder, paths, len(source))


def refuse_inside(address: str, folder: Path) -> None:
    """Shards written into the folder they are made from would be taken for the data the next time it is read."""
    target = folder.resolve()
    for part, _ in parts_of(address):
        if Path(part).is_dir() and target.is_relative_to(Path(part).resolve()):
            raise UserError(f"{folder}: lies inside of {part}, which is to be converted; give a folder elsewhere")


def _claim(folder: Path, about: dict[str, Any]) -> None:
    """Make the folder ours, or find that it already is."""
    state = folder / CONVERSION
    if state.is_file():
        try:
            stored = json.loads(state.read_bytes())
        except ValueError:
            stored = None
        if stored != about:
            raise UserError(
                f"{folder}: holds shards of other data or another --shard-size ({state}); give a new folder"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not an empty folder; give a new one, nothing is overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(state, about)


def _write_shard(path: Path, samples: Iterator[tuple[int, Entry]], faults: list[Fault]) -> None:
    """One shard beside its place, then moved there: it is whole or not there. `samples` fills `faults` on its way."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        write_tar(unfinished, samples)
        for fault in faults:
            append_line(path.with_name(SKIPPED), fault._asdict())
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    index_of(path)


def _samples(
    source: Source, labels: Sequence[int] | None, ids: Iterator[int], faults: list[Fault]
) -> Iterator[tuple[int, Entry]]:
    for id in ids:
        try:
            sample = source[id]
            if not sample.image:
                raise BadSample("image is empty", source.where(id))
            yield id, _members(sample, None if labels is None else labels[id])
        except BadSample as bad:
            faults.append(Fault(id, bad.reason, bad.where))


def _members(sample: Sample, label: int | None) -> list[tuple[str, bytes]]:
    """Image, caption and class as members of a shard: one caption as `txt`, several as a list in `json`."""
    # What is none of the usual kinds is kept as it is, for readers look at the content.
    members = [(ending_by_content(sample.image) or "jpg", sample.image)]
    if len(sample.captions) == 1:
        members.append(("txt", sample.captions[0].encode()))
    elif sample.captions:
        members.append(("json", json.dumps({"caption": sample.captions}, ensure_ascii=False).encode()))
    if label is not None:
        members.append(("cls", str(label).encode()))
    return members


def _begin_list(skipped: Path, without_ids: Sequence[Fault], id: int) -> None:
    """What never was a sample of the source, and what is listed of the samples before `id`: a kill between list and
    shard leaves lines that will be written again."""
    kept = [record for record in read_lines(skipped) if 0 <= record["id"] < id]
    records = [*(fault._asdict() for fault in without_ids), *kept]
    if records or skipped.exists():
        write_text_safely(skipped, "".join(json.dumps(record) + "\n" for record in records))


def _checked(folder: Path, paths: list[Path], expected: int) -> Converted:
    skipped: Counter[str] = Counter()
    readable = expected
    for record in read_lines(folder / SKIPPED):
        skipped[record["reason"]] += record.get("times", 1)
        readable -= record["id"] >= 0
    samples = sum(len(index_of(path).rows) for path in track(paths, "checking", len(paths), "shards"))
    if samples != readable:
        raise RunFailed(
            f"{folder}: holds {samples:,} samples where {readable:,} were written; "
            "the disk or another process has changed it; remove the folder and convert again"
        )
    for left in folder.glob(".*.unfinished"):  # by kills
        left.unlink(missing_ok=True)
    if samples == 0:
        reason, count = skipped.most_common(1)[0]
        raise RunFailed(
            f"{folder}: none of {expected:,} samples could be read, most often: {reason} ({count:,}); "
            f"all are listed in {folder / SKIPPED}"
        )
    return Converted(folder, samples, len(paths), skipped)
