"""The walk over the headers of a tar finds what tarfile finds, and ends whatever the bytes are."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuclip.data.tar.walk import Gap, members
from tests.data.small_shards import pair, write_tar


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_walk_finds_what_tarfile_finds(tmp_path, form):
    names = ["a.png", "folder/b.txt", "d" * 90 + "/" + "e" * 60 + ".jpg", "s" * 98 + ".x", "f" * 100]
    if form != tarfile.USTAR_FORMAT:
        names += ["long/" * 60 + "c.png", "größe.txt"]
    shard = write_tar(tmp_path / "0.tar", [(name, name.encode() * 7) for name in names], form)
    data = shard.read_bytes()
    with tarfile.open(shard) as tar:
        expected = [(member.name.encode(), member.offset_data, member.size) for member in tar]
    gaps: list[Gap] = []
    assert list(members(data, gaps)) == expected and not gaps


def test_folders_and_links_are_passed_over(tmp_path):
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE):
            information = tarfile.TarInfo("a.png")
            information.type, information.linkname = kind, "b.png"
            tar.addfile(information)
    assert list(members((tmp_path / "0.tar").read_bytes(), [])) == []


def test_a_negative_size_is_no_header(tmp_path):
    data = bytearray(write_tar(tmp_path / "0.tar", pair(0)).read_bytes())
    data[124:136] = b"-0000001000\0"  # int() would take it, and the walk would go round in a ring
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * ord(" ") + sum(data[156:512]))
    gaps: list[Gap] = []
    assert [name for name, _, _ in members(bytes(data), gaps)] == [b"00000.txt"] and gaps[0].start == 0


def _shard_bytes() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        long = [("long/" * 40 + "c.png", b"x" * 600), ("größe.txt", b"y")]
        return write_tar(Path(folder) / "0.tar", pair(0) + long, tarfile.PAX_FORMAT).read_bytes()


SHARD = _shard_bytes()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_bytes_make_the_walk_hang_or_reach_outside_the_file(tmp_path_factory, data):
    content = bytearray(SHARD)
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.sampled_from(b"\0 -+_07x\x80\xffLKg5"))
    cut = data.draw(st.integers(0, len(content)))
    found, gaps = [], []
    for count, (_, offset, size) in enumerate(members(bytes(content[:cut]), gaps)):
        found.append((offset, size))
        assert count < 100
    assert all(size >= 0 and offset + size <= cut for offset, size in found)
    assert len(gaps) < 100 and all(0 <= gap.start <= gap.stop <= cut for gap in gaps)
