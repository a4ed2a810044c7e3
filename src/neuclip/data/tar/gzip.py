"""Packed shards (`.tar.gz`, `.tgz`), unpacked once into the cache: gzip cannot be read at an offset."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from neuclip.data.machine import cache_folder
from neuclip.data.tar.files import NO_ROOM, UNFINISHED, UNFINISHED_SECONDS, mark_used, new_file, remove_unused
from neuclip.errors import UserError
from neuclip.progress import track

PACKED_DAMAGED, PACKED_CUT_OFF = "packed shard is damaged", "packed shard is cut off"
PACKED = re.compile(r"(\.tar)?\.gz$|\.tgz$", re.IGNORECASE)
STEP = 1 << 16  # bytes of a packed shard at a time
OWN_NAME = re.compile(r"[0-9a-f]{16}")  # of our folders; nothing else is ever removed


class Damage(NamedTuple):
    """Why a packed shard could not be unpacked to its end, or is not what was packed."""

    reason: str  # as faults are counted
    place: str  # in the packed file


def is_packed(name: str) -> bool:
    return PACKED.search(name) is not None


def plain_name(name: str) -> str:
    """The name of a shard once it is unpacked.

    >>> plain_name("0.tar.gz"), plain_name("0.tgz"), plain_name("0.tar")
    ('0.tar', '0.tar', '0.tar')
    """
    return PACKED.sub(".tar", name)


def plain_tars(shards: Sequence[Path]) -> list[Path]:
    """Each shard itself, or its unpacked copy in the cache. Old copies make room before new ones are made."""
    packed = [shard for shard in shards if is_packed(shard.name)]
    if not packed:
        return list(shards)
    copies = {shard: _copy_of(shard) for shard in packed}
    for copy in copies.values():
        mark_copy_used(copy)
    folder = _copies_folder()
    remove_unused(copy for copy in folder.glob("*") if OWN_NAME.fullmatch(copy.name))
    remove_unused(folder.glob(f"*/.*{UNFINISHED}"), UNFINISHED_SECONDS)
    missing = [shard for shard, copy in copies.items() if not copy.exists()]
    for shard in track(missing, "unpacking", len(missing), "shards"):
        _make_copy(shard, copies[shard])
    return [copies.get(shard, shard) for shard in shards]


def _copies_folder() -> Path:
    return cache_folder() / "unpacked"


def _copy_of(shard: Path) -> Path:
    """Where the copy of a packed shard is or will be. A shard that has changed has another."""
    try:
        status = shard.stat()
    except OSError as error:
        raise UserError(f"{shard}: cannot be read ({error.strerror}); check its permissions and the disk") from error
    identity = f"{shard.absolute()}\n{status.st_size}\n{status.st_mtime_ns}".encode(errors="surrogateescape")
    return _copies_folder() / hashlib.sha256(identity).hexdigest()[:16] / plain_name(shard.name)


def mark_copy_used(plain: Path) -> None:
    """The time of use is that of the copy's folder: the time of the copy itself tells whether it has changed. Tars
    that are no copies are left alone."""
    if plain.parent.parent == _copies_folder():
        mark_used(plain.parent)


def _make_copy(shard: Path, copy: Path) -> None:
    try:
        damage = unpack(shard, copy)
    except gzip.BadGzipFile as error:
        raise UserError(f"{shard}: is not a gzip file ({error}); fetch it again") from error
    except OSError as error:
        remedy = "check its permissions and the disk"
        if error.errno in (*NO_ROOM, errno.EROFS, errno.EACCES):
            remedy = "point NEUCLIP_CACHE to a folder with room, or unpack the shards yourself"
        raise UserError(f"{shard}: cannot be unpacked ({error.strerror or error}); {remedy}") from error
    if damage:
        print(
            f"{shard}: {damage.reason} {damage.place}; what comes before the damage is used, fetch it again",
            file=sys.stderr,
        )


def unpack(shard: Path, copy: Path, most: float = math.inf) -> Damage | None:
    """Unpack in one move, after a note of the damage. The copy of a damaged shard has all that is before the damage.
    Raises OSError if it would have more than `most` bytes."""
    with new_file(copy) as unfinished:
        with unfinished.open("wb") as target, shard.open("rb") as packed:
            damage = _decode(packed, target, most)
            if damage and target.tell() == 0:
                raise gzip.BadGzipFile("nothing in it can be read")
        _write_note(damage, copy)
        status = shard.stat()  # its time too: two processes that unpack at once make equal copies
        os.utime(unfinished, ns=(status.st_atime_ns, status.st_mtime_ns))
    return damage


def _write_note(damage: Damage | None, copy: Path) -> None:
    if damage is None:
        _note_of(copy).unlink(missing_ok=True)
        return
    with new_file(_note_of(copy)) as unfinished:
        unfinished.write_text(json.dumps(damage._asdict()), encoding="utf-8")


def damage_of(plain: Path) -> Damage | None:
    """What was wrong with the shard that this tar was unpacked from; None if nothing was, or it was never packed."""
    try:
        return Damage(**json.loads(_note_of(plain).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):  # half written when the power failed, or another user's
        return Damage(PACKED_DAMAGED, "at an unknown place (the note of it cannot be read)")


def _note_of(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.damage.json")


def _decode(packed: BinaryIO, target: BinaryIO, most: float) -> Damage | None:
    """Write the content of gzip members end to end, up to the first byte that makes no sense."""
    size = os.fstat(packed.fileno()).st_size
    decoder = zlib.decompressobj(wbits=31)  # gzip with its checksum
    inside = behind = False  # of a member, of the first member
    while chunk := packed.read(STEP):
        while chunk:
            if behind and not inside and not (chunk := chunk.lstrip(b"\0")):
                break  # padding between members, or behind the last
            before = decoder.copy()
            try:
                content = decoder.decompress(chunk)
            except zlib.error as error:
                at = packed.tell() - len(chunk) + _decode_to_damage(before, chunk, target)
                why = str(error).rpartition(": ")[2]
                return Damage(PACKED_DAMAGED, f"at packed byte {at} of {size} ({why})")
            if target.tell() + len(content) > most:
                raise OSError(errno.EFBIG, f"it unpacks to more than the {most:,} bytes of data.cache_size")
            target.write(content)
            chunk = decoder.unused_data
            inside = not decoder.eof
            if decoder.eof:
                behind = True
                decoder = zlib.decompressobj(wbits=31)
    return Damage(PACKED_CUT_OFF, f"at its end, packed byte {size}") if inside else None


def _decode_to_damage(decoder: Any, chunk: bytes, target: BinaryIO) -> int:
    """Byte by byte, because an error keeps what was decoded before it; how many bytes made sense."""
    for number in range(len(chunk)):
        try:
            target.write(decoder.decompress(chunk[number : number + 1]))
        except zlib.error:
            return number
    return len(chunk)
