"""Damaged shards by the hundred: all before the damage is read, nothing is paired wrongly, and the rest is counted."""

from __future__ import annotations

import random
import tarfile
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from neuclip.data.faults import FaultLog
from neuclip.records import read_lines
from tests.builders.data import Member, encoded, lengths, tar_bytes, write_files, write_tar
from tests.builders.reading import batches, content, open_source

PAIRS = 5  # in each shard
SEEDS = 20  # of each kind of damage: 180 shards in all
BLOCK = 512
FORMS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
EXTENSIONS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP"}
ALL = frozenset(range(PAIRS))


@dataclass(frozen=True)
class Damaged:
    content: bytes
    touched: frozenset[int]  # the pairs of which a byte, or a header's byte, was changed or taken
    gone: frozenset[int] = frozenset()  # those of which nothing is left that could tell that they were there
    readable: frozenset[int] = ALL  # those before the first damaged header


@cache
def image_of(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), list(EXTENSIONS.values())[number % len(EXTENSIONS)])


def number_of(member: Member) -> int:
    return int(member[0].rpartition("/")[2][:3])


def numbers(members: list[Member]) -> frozenset[int]:
    return frozenset(map(number_of, members))


class Shard:
    """PAIRS pairs. Every third name is too long for a plain header: GNU's and pax's own are then damaged too."""

    def __init__(self, form: int):
        self.form, self.members = form, list[Member]()
        for number in range(PAIRS):
            name = f"{'long/' * 25 * (number % 3 == 2 and form != tarfile.USTAR_FORMAT)}{number:03d}"
            caption = f"this is pair {number}"
            text = (f"{name}.txt", caption) if number % 2 else (f"{name}.json", f'{{"caption": "{caption}"}}')
            extension = list(EXTENSIONS)[number % len(EXTENSIONS)]
            self.members += [(f"{name}.{extension}", image_of(number)), (text[0], text[1].encode())]
        self.content = tar_bytes(self.members, form)
        ends = [len(tar_bytes(self.members[:count], form).rstrip(b"\0")) for count in range(len(self.members) + 1)]
        self.spans = list(pairwise(-(-end // BLOCK) * BLOCK for end in ends))  # of each member with all its headers

    def where(self, inside) -> list[Member]:
        return [member for member, span in zip(self.members, self.spans, strict=True) if inside(*span)]

    def as_tar(self, members: list[Member], touched: frozenset[int] = frozenset()) -> Damaged:
        """A whole tar of other members."""
        return Damaged(tar_bytes(members, self.form), touched, touched - numbers(members))

    def changed(self, now: bytes) -> Damaged:
        """Bytes changed in place, or cut off at the end."""
        touched = self.where(lambda start, stop: now[start:stop] != self.content[start:stop])
        broken = len(self.content)
        for (_, data), (start, stop) in zip(self.members, self.spans, strict=True):
            header = stop - -(-len(data) // BLOCK) * BLOCK
            if now[start:header] != self.content[start:header] or len(now) < stop:
                broken = min(broken, start)
        # Between two members a cut leaves nothing that could tell of those behind it.
        behind = self.where(lambda _, stop: stop > len(now))
        return Damaged(now, numbers(touched), numbers(behind), self.before(broken))

    def before(self, position: int) -> frozenset[int]:
        """Pairs that lie wholly before a position."""
        return ALL - numbers(self.where(lambda _, stop: stop > position))


def flipped_bytes(draw: random.Random, shard: Shard) -> Damaged:
    now = bytearray(shard.content)
    for _ in range(draw.choice((1, 1, 4, 40))):
        now[draw.randrange(shard.spans[-1][1])] ^= draw.randrange(1, 256)
    return shard.changed(bytes(now))


def flipped_bits_in_a_header(draw: random.Random, shard: Shard) -> Damaged:
    """In the fields that mean something: number of the pair, name, size, checksum, kind, magic, prefix."""
    now = bytearray(shard.content)
    start, stop = draw.choice(shard.spans)
    header = draw.choice([start, *range(start, stop - BLOCK, BLOCK)][:3])
    fields = [(2, 3), (0, 12), (124, 136), (148, 156), (156, 157), (257, 265), (345, 350)]
    now[header + draw.randrange(*draw.choice(fields))] ^= 1 << draw.randrange(8)
    return shard.changed(bytes(now))


def cut_off(draw: random.Random, shard: Shard) -> Damaged:
    return shard.changed(shard.content[: draw.randrange(shard.spans[-1][1])])


def block_overwritten(draw: random.Random, shard: Shard) -> Damaged:
    """Garbage or zeros over one block, most often a header: what a disk or a broken download leaves."""
    end = shard.spans[-1][1]
    start = draw.choice(shard.spans)[0] if draw.random() < 0.7 else draw.randrange(end // BLOCK) * BLOCK
    block = draw.choice((bytes(BLOCK), draw.randbytes(BLOCK)))
    return shard.changed(shard.content[:start] + block + shard.content[start + BLOCK :])


def blocks_taken_out(draw: random.Random, shard: Shard) -> Damaged:
    end = shard.spans[-1][1]
    first = draw.randrange(end)
    last = min(first + draw.choice((1, 100, BLOCK, 3 * BLOCK)), end)
    touched = numbers(shard.where(lambda start, stop: start < last and stop > first))
    left = numbers(shard.where(lambda start, stop: not (start >= first and stop <= last)))
    now = shard.content[:first] + shard.content[last:]
    return Damaged(now, touched, touched - left, shard.before(first))


def members_swapped(draw: random.Random, shard: Shard) -> Damaged:
    return shard.as_tar(draw.sample(shard.members, len(shard.members)))


def members_missing(draw: random.Random, shard: Shard) -> Damaged:
    gone = draw.sample(shard.members, draw.randrange(1, len(shard.members)))
    return shard.as_tar([member for member in shard.members if member not in gone], numbers(gone))


def member_twice(draw: random.Random, shard: Shard) -> Damaged:
    place = draw.randrange(len(shard.members) + 1)
    return shard.as_tar([*shard.members[:place], draw.choice(shard.members), *shard.members[place:]])


def member_spoilt(draw: random.Random, shard: Shard) -> Damaged:
    """A whole tar around an image or caption that is empty, cut off, or something else."""
    spoilt = draw.choice(shard.members)
    name, data = spoilt
    other = (name, draw.choice((b"", data[: len(data) // 2], draw.randbytes(60), b"<html>", b"\xff\xfe")))
    return shard.as_tar([other if member == spoilt else member for member in shard.members], numbers([spoilt]))


DAMAGES = (
    flipped_bytes, flipped_bits_in_a_header, cut_off, block_overwritten, blocks_taken_out, members_swapped,
    members_missing, member_twice, member_spoilt,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_all_before_the_damage_is_read_nothing_is_paired_wrongly_and_the_rest_is_counted(tmp_path, damage):
    shards = {}
    for seed in range(SEEDS):
        draw = random.Random(f"{damage.__name__} {seed}")
        shards[f"{seed:05d}.tar"] = damage(draw, Shard(draw.choice(FORMS)))
    folder = write_files(tmp_path / "shards", {name: damaged.content for name, damaged in shards.items()})
    source = open_source(folder)
    batch = next(batches(source, batch_size=len(source), tokens=lengths))  # one epoch, as a run reads it
    assert sorted(batch.ids.tolist()) == list(range(len(source)))
    every = [*source.faults, *batch.faults]
    log = FaultLog(tmp_path / "skipped.jsonl", limit=1)
    log.add(every)
    assert log.counts.total() == sum(fault.times for fault in every) and len(read_lines(log.path)) == len(every)
    assert all(fault.reason and str(folder) in fault.where for fault in every)
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
    lost = {number for number in ALL - damaged.touched if (number, number) not in shown}
    assert not lost & damaged.readable, f"{name}: {lost} lost although no header before them is damaged"
    assert len(lost) <= counted, f"{name}: {lost} lost, and {counted} counted"
    told = counted or len(samples) < size  # not indexed, or bad when it is read
    assert PAIRS - len(damaged.gone) <= size or told, f"{name}: {size} samples, and not a word of the others"


def test_a_member_name_that_points_elsewhere_is_a_name_and_nothing_is_written_there(tmp_path):
    names = ("../../evil", "/evil", "a/../../../evil")
    members = [m for name in names for m in ((f"{name}.png", image_of(0)), (f"{name}.txt", b"of an evil name"))]
    for name in ("plain.tar", "packed.tar.gz"):
        source = open_source(write_tar(tmp_path / "one" / "two" / name, members))
        assert content(source) == [(image_of(0), ("of an evil name",))] * 3 and not source.faults
    assert not list(tmp_path.rglob("*evil*")) and not Path("/evil.png").exists()
