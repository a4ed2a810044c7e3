"""Five hundred damaged shards: all before the damage is read, nothing is paired wrongly, and the rest is counted."""

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
from PIL import Image

from neuclip.errors import UserError
from neuclip.records import read_lines
from tests.builders.data import Member, batches, content, encoded, fault_log, lengths, open_source, outcomes, tar_bytes

PAIRS = 5  # in each shard
SEEDS = 56  # of each kind of damage: 504 in all
BLOCK = 512
FORMS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
EXTENSIONS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP"}


@dataclass(frozen=True)
class Damaged:
    content: bytes
    touched: frozenset[int]  # the pairs of which a byte, or a header's byte, was changed or taken
    gone: frozenset[int] = frozenset()  # those of which nothing is left that could tell that they were there
    readable: frozenset[int] | None = None  # those before the first damaged header; None: no header is damaged


Damage = Callable[[random.Random, list[Member], int], Damaged]


@cache
def image_of(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), list(EXTENSIONS.values())[number % len(EXTENSIONS)])


def members_of(form: int) -> list[Member]:
    """Every third name is too long for a plain header: GNU's and pax's own headers are then damaged too."""
    members = []
    for number in range(PAIRS):
        name = f"{'long/' * 25 * (number % 3 == 2 and form != tarfile.USTAR_FORMAT)}{number:03d}"
        caption = f"this is pair {number}"
        text = (f"{name}.txt", caption) if number % 2 else (f"{name}.json", f'{{"caption": "{caption}"}}')
        extension = list(EXTENSIONS)[number % len(EXTENSIONS)]
        members += [(f"{name}.{extension}", image_of(number)), (text[0], text[1].encode())]
    return members


def number_of(member: Member) -> int:
    return int(member[0].rpartition("/")[2][:3])


def tar_of(members: list[Member], form: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The tar, and from where to where each member lies in it with all its headers."""
    stream, starts = io.BytesIO(), []
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, data in members:
            information = tarfile.TarInfo(name)
            information.size = len(data)
            starts.append(tar.offset)
            tar.addfile(information, io.BytesIO(data))
        starts.append(tar.offset)
    return stream.getvalue(), list(pairwise(starts))


def numbers_up_to(members: list[Member], spans: list[tuple[int, int]], position: int) -> frozenset[int]:
    """Pairs that lie wholly before a position."""
    behind = {number_of(member) for member, (_, stop) in zip(members, spans, strict=True) if stop > position}
    return frozenset(range(PAIRS)) - behind


def changed(members: list[Member], form: int, change: Callable[[bytearray, list[tuple[int, int]]], None]) -> Damaged:
    """Bytes changed in place, or cut off at the end."""
    whole, spans = tar_of(members, form)
    now = bytearray(whole)
    change(now, spans)
    touched, first_header = set(), len(whole)
    for member, (start, stop) in zip(members, spans, strict=True):
        header = stop - -(-len(member[1]) // BLOCK) * BLOCK
        if bytes(now[start:stop]) != whole[start:stop]:
            touched.add(number_of(member))
        if bytes(now[start:header]) != whole[start:header] or len(now) < stop:
            first_header = min(first_header, start)
    cut = len(whole) > len(now)  # between two members a cut leaves nothing that could tell of those behind it
    behind = frozenset(range(PAIRS)) - numbers_up_to(members, spans, len(now)) if cut else frozenset()
    return Damaged(bytes(now), frozenset(touched), behind, numbers_up_to(members, spans, first_header))


def flipped_bytes(draw: random.Random, members: list[Member], form: int) -> Damaged:
    def change(now: bytearray, spans: list[tuple[int, int]]) -> None:
        for _ in range(draw.choice((1, 1, 4, 40))):
            now[draw.randrange(spans[-1][1])] ^= draw.randrange(1, 256)

    return changed(members, form, change)


def flipped_bits_in_a_header(draw: random.Random, members: list[Member], form: int) -> Damaged:
    """In the fields that mean something: number of the pair, name, size, checksum, kind, magic, prefix."""

    def change(now: bytearray, spans: list[tuple[int, int]]) -> None:
        start, stop = draw.choice(spans)
        header = draw.choice([start, *range(start, stop - BLOCK, BLOCK)][:3])
        fields = [(2, 3), (0, 12), (124, 136), (148, 156), (156, 157), (257, 265), (345, 350)]
        now[header + draw.randrange(*draw.choice(fields))] ^= 1 << draw.randrange(8)

    return changed(members, form, change)


def cut_off(draw: random.Random, members: list[Member], form: int) -> Damaged:
    return changed(members, form, lambda now, spans: now.__delitem__(slice(draw.randrange(spans[-1][1]), None)))


def block_overwritten(draw: random.Random, members: list[Member], form: int) -> Damaged:
    """Garbage or zeros over one block, most often a header: what a disk or a broken download leaves."""

    def change(now: bytearray, spans: list[tuple[int, int]]) -> None:
        start = draw.choice(spans)[0] if draw.random() < 0.7 else draw.randrange(spans[-1][1] // BLOCK) * BLOCK
        now[start : start + BLOCK] = draw.choice((bytes(BLOCK), draw.randbytes(BLOCK)))

    return changed(members, form, change)


def blocks_taken_out(draw: random.Random, members: list[Member], form: int) -> Damaged:
    whole, spans = tar_of(members, form)
    first = draw.randrange(spans[-1][1])
    last = min(first + draw.choice((1, 100, BLOCK, 3 * BLOCK)), spans[-1][1])
    lying = list(zip(members, spans, strict=True))
    touched = {number_of(member) for member, (start, stop) in lying if start < last and stop > first}
    left = {number_of(member) for member, (start, stop) in lying if not (start >= first and stop <= last)}
    readable = numbers_up_to(members, spans, first)
    return Damaged(whole[:first] + whole[last:], frozenset(touched), frozenset(touched - left), readable)


def members_swapped(draw: random.Random, members: list[Member], form: int) -> Damaged:
    draw.shuffle(members)
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
    name, data = members[place]
    members[place] = (name, draw.choice((b"", data[: len(data) // 2], draw.randbytes(60), b"<html>", b"\xff\xfe")))
    return Damaged(tar_of(members, form)[0], frozenset({number_of((name, data))}))


DAMAGES: tuple[Damage, ...] = (
    flipped_bytes, flipped_bits_in_a_header, cut_off, block_overwritten, blocks_taken_out, members_swapped,
    members_missing, member_twice, member_spoilt,
)  # fmt: skip


@pytest.mark.parametrize("kind", range(len(DAMAGES)), ids=lambda kind: DAMAGES[kind].__name__)
def test_all_before_the_damage_is_read_nothing_is_paired_wrongly_and_the_rest_is_counted(tmp_path, kind):
    shards = {}
    for seed in range(kind, SEEDS * len(DAMAGES), len(DAMAGES)):
        draw = random.Random(seed)
        form = draw.choice(FORMS)
        shards[f"{seed:05d}.tar"] = DAMAGES[kind](draw, members_of(form), form)
    (tmp_path / "shards").mkdir()
    for name, damaged in shards.items():
        (tmp_path / "shards" / name).write_bytes(damaged.content)
    source = open_source(tmp_path / "shards")
    batch = next(batches(source, batch_size=len(source), tokens=lengths))  # one epoch, as a run reads it
    assert sorted(batch.ids.tolist()) == list(range(len(source)))
    log = fault_log(tmp_path / "skipped.jsonl", limit=1)
    log.note_source(source)
    log.note_batch(batch)
    every = [*source.faults, *batch.faults]
    assert log.counts.total() == sum(fault.times for fault in every) and len(read_lines(log.path)) == len(every)
    assert all(fault.reason and str(tmp_path / "shards") in fault.where for fault in every)
    bad = {fault.id for fault in batch.faults}
    ids = {name: [id for id in range(len(source)) if name in source.where(id)] for name in shards}
    assert sum(map(len, ids.values())) == len(source)
    for name, damaged in shards.items():
        counted = sum(fault.times for fault in source.faults if name in fault.where)
        check_shard([source[id] for id in ids[name] if id not in bad], len(ids[name]), counted, damaged, name)


def check_shard(samples, size: int, counted: int, damaged: Damaged, name: str) -> None:
    number_of_image = {image_of(number): number for number in range(PAIRS)}
    number_of_caption = {(f"this is pair {number}",): number for number in range(PAIRS)}
    shown = [(number_of_image.get(one.image), number_of_caption.get(one.captions)) for one in samples]
    assert not [pair for pair in shown if None not in pair and pair[0] != pair[1]], f"{name}: another's caption"
    lost = {number for number in range(PAIRS) if number not in damaged.touched and (number, number) not in shown}
    behind = frozenset() if damaged.readable is None else frozenset(range(PAIRS)) - damaged.readable
    assert lost <= behind, f"{name}: {lost - behind} lost although no header before them is damaged"
    assert len(lost) <= counted, f"{name}: {lost} lost, and {counted} counted"
    told = counted or len(samples) < size  # not indexed, or bad when it is read
    assert PAIRS - len(damaged.gone) <= size or told, f"{name}: {size} samples, and not a word of the others"


def test_a_damaged_packed_shard_is_refused_in_one_line_or_read_and_counted(tmp_path):
    whole = gzip.compress(tar_of(members_of(FORMS[0]), FORMS[0])[0], mtime=0)
    for seed in range(40):
        draw, packed, address = random.Random(seed), bytearray(whole), tmp_path / f"{seed}.tar.gz"
        if seed % 2:
            del packed[draw.randrange(len(packed)) :]
        else:
            packed[draw.randrange(len(packed))] ^= 1 << draw.randrange(8)
        address.write_bytes(packed)
        try:
            source = open_source(address)
        except UserError as refusal:
            assert str(address) in str(refusal) and "\n" not in str(refusal)
        else:
            assert len(outcomes(source)) == len(source) and (len(source) == PAIRS or source.faults)


def test_a_member_name_that_points_elsewhere_is_a_name_and_nothing_is_written_there(tmp_path):
    folder = tmp_path / "one" / "two"
    folder.mkdir(parents=True)
    names = ("../../evil", "/evil", "a/../../../evil")
    members = [m for name in names for m in ((f"{name}.png", image_of(0)), (f"{name}.txt", b"of an evil name"))]
    (folder / "plain.tar").write_bytes(tar_bytes(members))
    (folder / "packed.tar.gz").write_bytes(gzip.compress(tar_bytes(members)))
    for name in ("plain.tar", "packed.tar.gz"):
        source = open_source(folder / name)
        assert content(source) == [(image_of(0), ("of an evil name",))] * 3 and not source.faults
    assert not list(tmp_path.rglob("*evil*")) and not Path("/evil.png").exists()
