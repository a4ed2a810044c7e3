"""The members of a plain tar, found by a walk over its headers: ten times as fast as tarfile."""

from __future__ import annotations

import mmap
import re
import struct
import zlib
from typing import NamedTuple

BLOCK = 512  # tar's unit
HEADER = struct.Struct("100s24x12s12x8sc100x6s82x155s12x")  # name, size, checksum, kind, magic, prefix
MAGIC, MAGIC_AT = re.compile(b"ustar"), 257
REGULAR, WITHOUT_DATA = (b"0", b"\0", b"7"), (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices and folders: no data
CUT_OFF, DAMAGED, NOT_TAR = "shard is cut off", "shard is damaged", "shard is not a tar file"
ENDS_IN_ZEROS = "shard ends in zeros"  # an interrupted download that made room beforehand
MOST_PADDING = 1 << 16  # bytes of zeros behind the last member; tar fills up to 10,240
PAX = re.compile(rb"\d+ (path|size)=([^\n]*)\n")

Member = tuple[bytes, int, int]  # name, offset of its bytes, number of bytes


class Damage(NamedTuple):
    """Where the walk ended too early, and the names of members from there on, which are lost."""

    reason: str
    position: int
    lost: tuple[bytes, ...] = ()


def walk(data: mmap.mmap | bytes) -> tuple[list[Member], Damage | None]:
    """Every regular file in order. Reads ustar, GNU and pax headers, and several tars end to end like one.

    It ends at the first header that makes no sense: what follows might be paired with the wrong caption.
    """
    found: list[Member] = []
    position, end, zeros = 0, len(data), -1  # where empty blocks began, just before the position
    name, size = b"", -1  # of the next member, where a header of its own says them
    while position < end:
        header = data[position : position + BLOCK]
        if not any(header):
            zeros, position = position, _end_of_zeros(data, position)
            if position >= end and end - zeros > MOST_PADDING:
                return found, Damage(ENDS_IN_ZEROS, zeros)
            continue
        fields = _read_header(header)
        if fields is None:
            reason = NOT_TAR if position == 0 else CUT_OFF if len(header) < BLOCK else DAMAGED
            return found, Damage(reason, position if zeros < 0 else zeros, _names_behind(data, position))
        zeros = -1
        kind, own_name, own_size = fields
        start, length = position + BLOCK, own_size
        if kind in REGULAR:
            length = own_size if size < 0 else size
        elif kind in WITHOUT_DATA:
            length = 0
        if start + length > end:
            return found, Damage(CUT_OFF, position, (name or own_name,))
        if kind == b"L":
            name = data[start : start + length].rstrip(b"\0")
        elif kind == b"x":
            for key, value in PAX.findall(data[start : start + length]):
                name, size = (value, size) if key == b"path" else (name, int(value) if value.isdigit() else size)
        elif kind not in (b"K", b"g"):
            if kind in REGULAR:
                found.append((name or own_name, start, length))
            name, size = b"", -1
        position = start + (length + BLOCK - 1) // BLOCK * BLOCK
    return found, Damage(CUT_OFF, end) if position > end else None


def _read_header(header: bytes) -> tuple[bytes, bytes, int] | None:
    """Kind, name and size; None if this is no header: if its checksum is wrong."""
    try:
        name, size, checksum, kind, magic, prefix = HEADER.unpack(header)
        # The sum of all bytes, the field's own eight counted as blanks. Adler-32's lower half is such a sum, from 1 on.
        total = int(checksum.rstrip(b"\0 "), 8) + sum(checksum) - 8 * 32
        if zlib.adler32(header) & 0xFFFF != (total + 1) % 65521:
            return None
        length = int.from_bytes(size[1:], "big") if size[0] & 0x80 else int(size.rstrip(b"\0 ") or b"0", 8)
    except (ValueError, struct.error):  # no numbers, fewer bytes than a header has
        return None
    name = name.partition(b"\0")[0]
    if prefix[0] and magic == b"ustar\0":  # GNU headers ("ustar ") use these bytes for other things
        name = prefix.partition(b"\0")[0] + b"/" + name
    return (kind, name, length) if length >= 0 else None


def _end_of_zeros(data: mmap.mmap | bytes, position: int) -> int:
    """The first block from here that is not empty, or the end of the file."""
    while position < len(data):
        stretch = data[position : position + (1 << 20)]
        if rest := len(stretch.lstrip(b"\0")):
            return position + (len(stretch) - rest) // BLOCK * BLOCK
        position += len(stretch)
    return position


def _names_behind(data: mmap.mmap | bytes, position: int) -> tuple[bytes, ...]:
    names, long_name = [], b""
    for match in MAGIC.finditer(data, position + MAGIC_AT):
        place = match.start() - MAGIC_AT
        kind, name, size = _read_header(data[place : place + BLOCK]) or (b"", b"", 0)
        content = data[place + BLOCK : place + BLOCK + min(size, MOST_PADDING)] if kind in (b"L", b"x") else b""
        if kind == b"L":
            long_name = content.rstrip(b"\0")
        elif kind == b"x":
            long_name = dict(PAX.findall(content)).get(b"path", long_name)
        elif kind in REGULAR:
            names.append(long_name or name)
            long_name = b""
    return tuple(names)
