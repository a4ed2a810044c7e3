"""Five hundred damaged shards: each is read to its end, what was not touched is found, and what it lost is counted."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from neuclip.data.sample import Batch
from PIL import Image

from neuclip.data.faults import FaultLog
from neuclip.data.loader import Batches
from neuclip.data.open import open_source
from neuclip.data.order import Order
from neuclip.data.source import Source
from neuclip.data.tar.index import BLOCK
from neuclip.errors import RunFailed, UserError
from neuclip.records import read_lines

PAIRS = 5  # in the damaged shard; the two after them lie in a shard that stays whole
FORMS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
EXTENSIONS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP"}
Member = tuple[str, bytes]


@dataclass(frozen=True)
class Damaged:
    content: bytes
    touched: frozenset[int]  # the pairs of which a byte, or a header's byte, was changed or taken
    gone: frozenset[int] = frozenset()  # those of which nothing is left that could tell that they were there
    shifted: frozenset[int] = frozenset()  # those behind a loss of less than a block: there, but not where tar looks


Damage = Callable[[random.Random, list[Member], int], Damaged]


@cache
def image_bytes(number: int, extension: str) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, EXTENSIONS[extension])
    return stream.getvalue()


def name_of(number: int, form: int) -> str:
    """Every third one too long for a plain header: GNU's and pax's own headers are then damaged too."""
    folder = "long/" * 25 if number % 3 == 2 and form != tarfile.USTAR_FORMAT else ""
    return f"{folder}{number:03d}"


def members_of(numbers: range, form: int) -> list[Member]:
    members = []
    for number in numbers:
        extension = list(EXTENSIONS)[number % len(EXTENSIONS)]
        caption = f"this is pair {number}"
        text = ("txt", caption.encode()) if number % 2 else ("json", f'{{"caption": "{caption}"}}'.encode())
        image = (extension, image_bytes(number, extension))
        members += [(f"{name_of(number, form)}.{end}", content) for end, content in (image, text)]
    return members


def number_of(member: Member) -> int:
    return int(member[0].rpartition("/")[2][:3])


def tar_of(members: list[Member], form: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The tar, and from where to where each member lies in it with all its headers."""
    stream, starts = io.BytesIO(), []
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, content in members:
            information = tarfile.TarInfo(name)
            information.size = len(content)
            starts.append(tar.offset)
            tar.addfile(information, io.BytesIO(content))
        starts.append(tar.offset)
    return stream.getvalue(), list(pairwise(starts))


def changed(members: list[Member], form: int, change: Callable[[bytearray, list[tuple[int, int]]], None]) -> Damaged:
    """Bytes changed in place, or cut off at the end."""
    whole, spans = tar_of(members, form)
    content = bytearray(whole)
    change(content, spans)
    touched = {
        number_of(member) for member, (a, b) in zip(members, spans, strict=True) if bytes(content[a:b]) != whole[a:b]
    }
    return Damaged(bytes(content), frozenset(touched))


def flipped_bytes(draw: random.Random, members: list[Member], form: int) -> Damaged:
    def change(content: bytearray, spans: list[tuple[int, int]]) -> None:
        for _ in range(draw.choice((1, 1, 4, 40))):
            content[draw.randrange(spans[-1][1])] ^= draw.randrange(1, 256)

    return changed(members, form, change)


def flipped_bits_in_a_header(draw: random.Random, members: list[Member], form: int) -> Damaged:
    """In the fields that mean something: number of the pair, name, size, checksum, kind, magic, prefix."""

    def change(content: bytearray, spans: list[tuple[int, int]]) -> None:
        start, stop = draw.choice(spans)
        header = draw.choice([start, *range(start, stop - BLOCK, BLOCK)][:3])
        fields = [(2, 3), (0, 12), (124, 136), (148, 156), (156, 157), (257, 265), (345, 350)]
        content[header + draw.randrange(*draw.choice(fields))] ^= 1 << draw.randrange(8)

    return changed(members, form, change)


def cut_off(draw: random.Random, members: list[Member], form: int) -> Damaged:
    def change(content: bytearray, spans: list[tuple[int, int]]) -> None:
        del content[draw.randrange(spans[-1][1]) :]

    return changed(members, form, change)


def block_overwritten(draw: random.Random, members: list[Member], form: int) -> Damaged:
    """Garbage or zeros over one block, most often a header: what a disk or a broken download leaves."""

    def change(content: bytearray, spans: list[tuple[int, int]]) -> None:
        start = draw.choice(spans)[0] if draw.random() < 0.7 else draw.randrange(spans[-1][1] // BLOCK) * BLOCK
        content[start : start + BLOCK] = draw.choice((bytes(BLOCK), draw.randbytes(BLOCK)))

    return changed(members, form, change)


def blocks_taken_out(draw: random.Random, members: list[Member], form: int) -> Damaged:
    whole, spans = tar_of(members, form)
    first = draw.randrange(spans[-1][1])
    last = min(first + draw.choice((1, 100, BLOCK, 3 * BLOCK)), spans[-1][1])
    touched = {number_of(member) for member, (a, b) in zip(members, spans, strict=True) if a < last and b > first}
    behind = {number_of(member) for member, (a, b) in zip(members, spans, strict=True) if b > last}
    shifted = frozenset(behind if (last - first) % BLOCK else ())
    return Damaged(whole[:first] + whole[last:], frozenset(touched), shifted=shifted)


def members_swapped(draw: random.Random, members: list[Member], form: int) -> Damaged:
    first, second = draw.sample(range(len(members)), 2)
    members[first], members[second] = members[second], members[first]
    return Damaged(tar_of(members, form)[0], frozenset())


def members_missing(draw: random.Random, members: list[Member], form: int) -> Damaged:
    gone = draw.sample(members, draw.randrange(1, len(members)))
    kept = [member for member in members if member not in gone]
    touched = frozenset(number_of(member) for member in gone)
    return Damaged(tar_of(kept, form)[0], touched, touched - {number_of(member) for member in kept})


def member_twice(draw: random.Random, members: list[Member], form: int) -> Damaged:
    members.insert(draw.randrange(len(members) + 1), draw.choice(members))
    return Damaged(tar_of(members, form)[0], frozenset())


def member_spoilt(draw: random.Random, members: list[Member], form: int) -> Damaged:
    """A whole tar around an image or caption that is empty, cut off, or something else."""
    place = draw.randrange(len(members))
    name, content = members[place]
    spoilt = draw.choice((b"", content[: len(content) // 2], draw.randbytes(60), b"<html>", b"\xff\xfe"))
    members[place] = (name, spoilt)
    return Damaged(tar_of(members, form)[0], frozenset({number_of((name, content))}))


DAMAGES: tuple[Damage, ...] = (
    flipped_bytes, flipped_bits_in_a_header, cut_off, block_overwritten, blocks_taken_out, members_swapped,
    members_missing, member_twice, member_spoilt,
)  # fmt: skip


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB").resize((4, 4)))).permute(2, 0, 1)


def tokens(captions: list[str]) -> torch.Tensor:
    return torch.zeros(len(captions), 1, dtype=torch.int64)


def read_all(source: Source) -> Batch:
    """One epoch as one batch, as a run reads it."""
    size = len(source)
    return next(
        Batches(source, Order(size, seed=0), batch_size=size, transform=pixels, tokenize=tokens, seed=0, workers=0)
        .steps(0, 1)
    )  # fmt: skip


def check_all_is_readable_or_counted(source: Source, damaged: Damaged, shard: str, log: FaultLog) -> None:
    batch = read_all(source)
    log.note_source(source)
    log.note(batch)
    bad = {fault.id for fault in batch.faults}
    assert sorted(batch.ids.tolist()) == list(range(len(source))) and batch.images.shape == (len(source), 3, 4, 4)
    assert len(bad) == len(batch.faults) and len(source.captions()) == len(source)
    faults = [*source.faults, *batch.faults]
    assert all(fault.reason and shard in fault.where for fault in faults), faults  # the other shard has none
    assert len(read_lines(log.path)) == len(faults) and log.counts.total() == sum(fault.times for fault in faults)
    samples = [source[id] for id in range(len(source)) if id not in bad]
    number_of_image = {image_bytes(n, list(EXTENSIONS)[n % len(EXTENSIONS)]): n for n in range(PAIRS + 2)}
    number_of_caption = {(f"this is pair {n}",): n for n in range(PAIRS + 2)}
    shown = [(number_of_image.get(sample.image), number_of_caption.get(sample.captions)) for sample in samples]
    assert not [pair for pair in shown if None not in pair and pair[0] != pair[1]], "an image got another's caption"
    lost = {n for n in range(PAIRS + 2) if n not in damaged.touched and (n, n) not in shown}
    assert lost <= damaged.shifted, f"{lost - damaged.shifted} lost although none of their bytes were"
    missing = PAIRS + 2 - len(damaged.gone) - len(source)
    assert missing <= 0 or source.faults, f"{missing} lost without a word"
    assert len(lost) <= sum(fault.times for fault in source.faults), f"{lost} lost, and fewer counted"


def check(seed: int, folder: Path) -> str:
    """What became of the damage of this seed: "refused", or "read"."""
    draw = random.Random(seed)
    form = draw.choice(FORMS)
    damaged = DAMAGES[seed % len(DAMAGES)](draw, members_of(range(PAIRS), form), form)
    folder.mkdir()
    (folder / "00000.tar").write_bytes(damaged.content)
    (folder / "00001.tar").write_bytes(tar_of(members_of(range(PAIRS, PAIRS + 2), form), form)[0])
    try:
        source = open_source(str(folder))
        check_all_is_readable_or_counted(source, damaged, "00000.tar", FaultLog(folder / "skipped.jsonl", limit=1))
    except (UserError, RunFailed) as refusal:
        assert str(folder) in str(refusal) and "\n" not in str(refusal)
        return "refused"
    return "read"


@pytest.mark.parametrize("kind", range(len(DAMAGES)), ids=lambda kind: DAMAGES[kind].__name__)
def test_a_damaged_shard_is_read_to_its_end_and_what_it_lost_is_counted(tmp_path, kind):
    """Over all kinds 504 seeds."""
    outcomes = [check(seed, tmp_path / str(seed)) for seed in range(kind, 56 * len(DAMAGES), len(DAMAGES))]
    assert outcomes == ["read"] * 56  # the whole shard beside it is reason enough to go on


def test_a_damaged_packed_shard_is_refused_in_one_line_or_read_and_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "cache"))
    whole = gzip.compress(tar_of(members_of(range(PAIRS), FORMS[0]), FORMS[0])[0], mtime=0)
    for seed in range(60):
        draw, packed, address = random.Random(seed), bytearray(whole), tmp_path / f"{seed}.tar.gz"
        if seed % 2:
            del packed[draw.randrange(len(packed)) :]
        else:
            packed[draw.randrange(len(packed))] ^= 1 << draw.randrange(8)
        address.write_bytes(packed)
        try:
            source = open_source(str(address))
        except UserError as refusal:
            assert str(address) in str(refusal) and "\n" not in str(refusal)
        else:
            assert ids_readable_or_bad(source) == len(source) and (len(source) == PAIRS or source.faults)


def ids_readable_or_bad(source: Source) -> int:
    try:
        return len(read_all(source).ids)
    except RunFailed:  # not one is readable
        return len(source)


def test_a_member_name_that_points_elsewhere_is_a_name_and_nothing_is_written_there(tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "one" / "two"
    folder.mkdir(parents=True)
    names = ("../../evil", "/evil", "a/../../../evil")
    image = image_bytes(0, "png")
    members = [member for name in names for member in ((f"{name}.png", image), (f"{name}.txt", b"of an evil name"))]
    content, _ = tar_of(members, FORMS[0])
    (folder / "plain.tar").write_bytes(content)
    (folder / "packed.tar.gz").write_bytes(gzip.compress(content))
    for name in ("plain.tar", "packed.tar.gz"):
        source = open_source(str(folder / name))
        assert [source[id].image for id in range(len(source))] == [image] * len(names)
        assert not read_all(source).faults and not source.faults
    assert not list(tmp_path.rglob("*evil*")) and not Path("/evil.png").exists()
