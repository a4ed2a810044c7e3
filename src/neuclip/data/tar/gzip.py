"""Packed shards (`.tar.gz`, `.tgz`), unpacked once into the cache: gzip cannot be read at an offset."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from neuclip.data.machine import cache_folder
from neuclip.errors import UserError
from neuclip.progress import track

if TYPE_CHECKING:
    from neuclip.data.tar.remote import RemoteShard

PACKED_DAMAGED, PACKED_CUT_OFF = "packed shard is damaged", "packed shard is cut off"
STEP = 1 << 16  # bytes of a packed shard at a time
DAY = 24 * 3600
UNFINISHED_SECONDS = 2 * DAY  # an unpacking that has not gone on for so long was killed
UNUSED_SECONDS = 30 * DAY  # a copy that no run has opened for so long is removed
OWN_NAME = re.compile(r"[0-9a-f]{16}")  # of our folders; nothing else is ever removed


class Damage(NamedTuple):
    """Why a packed shard could not be unpacked to its end, or is not what was packed."""

    reason: str  # as faults are counted
    place: str  # in the packed file


def is_packed(shard: Path | RemoteShard) -> bool:
    return shard.name.lower().endswith((".gz", ".tgz"))


def plain_tars(shards: Sequence[Path]) -> list[Path]:
    """Each shard itself, or its unpacked copy in the cache. Old copies make room before new ones are made."""
    plain = [copy_of(shard) if is_packed(shard) else shard for shard in shards]
    if any(map(is_packed, shards)):
        for copy in plain:
            mark_used(copy)
        remove_unused()
    missing = [(shard, copy) for shard, copy in zip(shards, plain, strict=True) if shard != copy and not copy.exists()]
    for shard, copy in track(missing, "unpacking", len(missing), "shards"):
        _make_copy(shard, copy)
    return plain


def copy_of(shard: Path) -> Path:
    """Where the copy of a packed shard is or will be. A shard that has changed has another."""
    try:
        status = shard.stat()
    except OSError as error:
        raise UserError(f"{shard}: cannot be read ({error.strerror}); check its permissions and the disk") from error
    # "noted": copies of earlier versions, which have no note of their damage, are not used.
    identity = f"{shard.absolute()}\n{status.st_size}\n{status.st_mtime_ns}\nnoted".encode(errors="surrogateescape")
    name = re.sub(r"(\.tar)?(\.gz|\.tgz)$", "", shard.name, flags=re.IGNORECASE)
    return copies_folder() / hashlib.sha256(identity).hexdigest()[:16] / f"{name}.tar"


def copies_folder() -> Path:
    return cache_folder() / "unpacked"


def mark_used(plain: Path) -> None:
    """A copy counts as used now; other files are left alone. The time is its folder's: its own tells of a change."""
    if plain.parent.parent == copies_folder():
        with contextlib.suppress(OSError):  # not there yet, or another user's
            os.utime(plain.parent)


def remove_unused() -> None:
    """Copies that no run has opened for long, and what killed unpackings have begun."""
    for folder in copies_folder().glob("*"):
        if OWN_NAME.fullmatch(folder.name) and _is_older(folder, UNUSED_SECONDS):
            shutil.rmtree(folder, ignore_errors=True)
    remove_unfinished(copies_folder().glob("*/.*.part"), UNFINISHED_SECONDS)


def remove_unfinished(files: Iterable[Path], seconds: float) -> None:
    """Those that nothing was done to for so long. The time of writing does not tell: just before an unpacked file is
    moved, it gets that of its shard."""
    for file in files:
        with contextlib.suppress(OSError):  # another process was faster, or it is another user's
            if file.is_file() and file.stat().st_ctime < time.time() - seconds:
                file.unlink()


def _is_older(path: Path, seconds: float) -> bool:
    try:
        return path.stat().st_mtime < time.time() - seconds
    except OSError:  # another process was faster
        return False


def _make_copy(shard: Path, copy: Path) -> None:
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        damage = unpack(shard, copy)
    except gzip.BadGzipFile as error:
        raise UserError(f"{shard}: is not a gzip file ({error}); fetch it again") from error
    except OSError as error:
        remedy = "check its permissions and the disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            remedy = "point NEUCLIP_CACHE to a folder with room, or unpack the shards yourself"
        raise UserError(f"{shard}: cannot be unpacked ({error.strerror or error}); {remedy}") from error
    if damage:
        print(
            f"{shard}: {damage.reason} {damage.place}; what could be unpacked before is used, fetch it again",
            file=sys.stderr,
        )


def unpack(shard: Path, copy: Path) -> Damage | None:
    """In one move, and a note of its damage before. Of a damaged one the copy has all that comes before the damage."""
    handle, temporary = tempfile.mkstemp(dir=copy.parent, prefix=f".{copy.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as target, shard.open("rb") as packed:
            damage = decode(packed, target)
            if damage and target.tell() == 0:
                raise gzip.BadGzipFile("nothing in it can be read")
        _write_note(damage, copy, Path(f"{temporary}.part"))
        status = shard.stat()  # its time too: two processes that unpack at once make equal copies
        os.utime(temporary, ns=(status.st_atime_ns, status.st_mtime_ns))
        Path(temporary).chmod(0o644)  # mkstemp's 0600 would hide it from others who share the cache
        Path(temporary).replace(copy)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return damage


def _write_note(damage: Damage | None, copy: Path, unfinished: Path) -> None:
    if damage is None:
        _note_of(copy).unlink(missing_ok=True)
        return
    unfinished.write_text(json.dumps(damage._asdict()), encoding="utf-8")
    unfinished.replace(_note_of(copy))


def damage_of(plain: Path) -> Damage | None:
    """What was wrong with the shard that this tar was unpacked from; None if nothing was, or it was never packed."""
    try:
        return Damage(**json.loads(_note_of(plain).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):  # half written when the power failed, or another user's
        return Damage(PACKED_DAMAGED, "at a place that its note no longer tells")


def _note_of(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.damage.json")


def decode(packed: BinaryIO, target: BinaryIO) -> Damage | None:
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
            target.write(content)
            chunk = decoder.unused_data
            inside = not decoder.eof
            if decoder.eof:
                behind = True
                decoder = zlib.decompressobj(wbits=31)
    return Damage(PACKED_CUT_OFF, f"at its end, packed byte {size}") if inside else None


def _decode_to_damage(decoder: Any, chunk: bytes, target: BinaryIO) -> int:
    """Byte by byte, because an error keeps to itself what was decoded before it; how many bytes made sense."""
    for number in range(len(chunk)):
        try:
            target.write(decoder.decompress(chunk[number : number + 1]))
        except zlib.error:
            return number
    return len(chunk)
