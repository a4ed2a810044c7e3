"""Finds the members of a plain tar by walking over its headers, ten times as fast as tarfile."""

from __future__ import annotations

import mmap
import re
import struct
import zlib
from typing import NamedTuple

BLOCK = 512  # bytes; headers and contents begin at multiples of it
HEADER = struct.Struct("100s24x12s12x8sc100x6s82x155s12x")  # name, size, checksum, kind, magic, prefix
MAGIC, MAGIC_AT = re.compile(b"ustar"), 257
REGULAR, WITHOUT_DATA = (b"0", b"\0", b"7"), (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices and folders: no data
CUT_OFF, DAMAGED, NOT_TAR = "shard is cut off", "shard is damaged", "shard is not a tar file"
ENDS_IN_ZEROS = "shard ends in zeros"  # the remains of an interrupted download that reserved its space first
MOST_PADDING = 1 << 16  # bytes of zeros after the last member; tar pads files to multiples of 10,240
PAX = re.compile(rb"\d+ (path|size)=([^\n]*)\n")

Member = tuple[bytes, int, int]  # name, offset of its bytes, number of bytes


class Damage(NamedTuple):
    """The position where the walk had to stop, and the names of the members after it, which are lost."""

    reason: str
    position: int
    lost: tuple[bytes, ...] = ()


def walk(data: mmap.mmap | bytes) -> tuple[list[Member], Damage | None]:
    """The regular files of a tar in order, and its damage, if any. Reads ustar, GNU and pax headers, and concatenated
    tars like one.

    The walk stops at the first invalid header: members after it might be paired with wrong captions.
    """
    members: list[Member] = []
    position, end, zeros = 0, len(data), -1  # zeros: where empty blocks directly before `position` begin, or -1
    name, size = b"", -1  # of the next member, if a GNU or pax header before it gives them
    while position < end:
        header = data[position : position + BLOCK]
        if not any(header):
            zeros, position = position, _end_of_zeros(data, position)
            if position >= end and end - zeros > MOST_PADDING:
                return members, Damage(ENDS_IN_ZEROS, zeros)
            continue
        fields = _read_header(header)
        if fields is None:
            reason = NOT_TAR if position == 0 else CUT_OFF if len(header) < BLOCK else DAMAGED
            return members, Damage(reason, position if zeros < 0 else zeros, _names_after(data, position))
        zeros = -1
        kind, header_name, header_size = fields
        start, length = position + BLOCK, header_size
        if kind in REGULAR:
            length = header_size if size < 0 else size
        elif kind in WITHOUT_DATA:
            length = 0
        if start + length > end:
            return members, Damage(CUT_OFF, position, (name or header_name,))
        if kind == b"L":
            name = data[start : start + length].rstrip(b"\0")
        elif kind == b"x":
            for key, value in PAX.findall(data[start : start + length]):
                name, size = (value, size) if key == b"path" else (name, int(value) if value.isdigit() else size)
        elif kind not in (b"K", b"g"):
            if kind in REGULAR:
                members.append((name or header_name, start, length))
            name, size = b"", -1
        position = start + (length + BLOCK - 1) // BLOCK * BLOCK
    return members, Damage(CUT_OFF, end) if position > end else None


def _read_header(header: bytes) -> tuple[bytes, bytes, int] | None:
    """The kind, name and size in a header; None if it is not a header or its checksum is wrong."""
    try:
        name, size, checksum, kind, magic, prefix = HEADER.unpack(header)
        # The checksum is the sum of all bytes, with the checksum's own eight bytes counted as blanks. The lower half of
        # Adler-32 is the sum of all bytes plus 1.
        total = int(checksum.rstrip(b"\0 "), 8) + sum(checksum) - 8 * 32
        if zlib.adler32(header) & 0xFFFF != (total + 1) % 65521:
            return None
        length = int.from_bytes(size[1:], "big") if size[0] & 0x80 else int(size.rstrip(b"\0 ") or b"0", 8)
    except (ValueError, struct.error):  # a field is not a number, or the header is too short
        return None
    name = name.partition(b"\0")[0]
    if prefix[0] and magic == b"ustar\0":  # GNU headers ("ustar ") use these bytes for something else
        name = prefix.partition(b"\0")[0] + b"/" + name
    return (kind, name, length) if length >= 0 else None


def _end_of_zeros(data: mmap.mmap | bytes, position: int) -> int:
    """The position of the first block from here that is not empty, or the end of the file."""
    while position < len(data):
        stretch = data[position : position + (1 << 20)]
        if rest := len(stretch.lstrip(b"\0")):
            return position + (len(stretch) - rest) // BLOCK * BLOCK
        position += len(stretch)
    return position


def _names_after(data: mmap.mmap | bytes, position: int) -> tuple[bytes, ...]:
    """The names of the members whose headers can still be found after this position."""
    names, long_name = [], b""
    for match in MAGIC.finditer(data, position + MAGIC_AT):
        start = match.start() - MAGIC_AT
        kind, name, size = _read_header(data[start : start + BLOCK]) or (b"", b"", 0)
        content = data[start + BLOCK : start + BLOCK + min(size, MOST_PADDING)] if kind in (b"L", b"x") else b""
        if kind == b"L":
            long_name = content.rstrip(b"\0")
        elif kind == b"x":
            long_name = dict(PAX.findall(content)).get(b"path", long_name)
        elif kind in REGULAR:
            names.append(long_name or name)
            long_name = b""
    return tuple(names)
