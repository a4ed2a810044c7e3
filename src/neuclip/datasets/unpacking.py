"""Unpacking npm's .tgz, Debian's .deb and Python's .whl: regular files only, and never outside the folder."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from neuclip.errors import RunFailed
from neuclip.progress import SILENT_SECONDS, StatusLine

AR_MAGIC = b"!<arch>\n"
AR_HEADER_BYTES = 60
DECOMPRESSORS: dict[str, Callable[[IO[bytes]], Any]] = {
    "tar": contextlib.nullcontext,
    "gz": gzip.open,
    "bz2": bz2.open,
    "xz": lzma.open,
}
BROKEN = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, ValueError)

File = tuple[str, IO[bytes], float]  # name in the archive, content, share of the archive that is done


def unpack_package(archive: Path, folder: Path) -> None:
    """Unpack beside `folder` and move it there in one step: it is whole or not there."""
    for left_over in folder.parent.glob(f".{folder.name}.*"):  # of killed calls
        shutil.rmtree(left_over, ignore_errors=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    status = StatusLine(silent_seconds=SILENT_SECONDS)
    try:
        for name, content, share in _files(archive):
            if status.due():
                status.show(f"unpacking {archive.name}  {share:.0%}")
            if target := _inside(unfinished, name):
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
        unfinished.rename(folder)
    except BROKEN as error:
        raise RunFailed(f"{archive}: cannot be unpacked ({error}); delete this file and try again") from error
    except FileNotFoundError as error:  # nothing was written, so there is nothing to move
        raise RunFailed(f"{archive}: holds no files; delete this file and try again") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        status.close()


def _inside(folder: Path, name: str) -> Path | None:
    """Where a member goes; None for one that would lie outside."""
    parts = [part for part in PurePosixPath(name.replace("\\", "/")).parts if part not in ("/", ".")]
    if not parts or ".." in parts or ":" in parts[0]:
        return None
    return folder.joinpath(*parts)


def _files(archive: Path) -> Iterator[File]:
    if archive.suffix == ".whl":
        return _files_of_zip(archive)
    return _files_of_deb(archive) if archive.suffix == ".deb" else _files_of_tgz(archive)


def _files_of_zip(archive: Path) -> Iterator[File]:
    with zipfile.ZipFile(archive) as members:
        names = [member for member in members.infolist() if not member.is_dir()]
        for number, member in enumerate(names):
            with members.open(member) as content:
                yield member.filename, content, number / len(names)


def _files_of_tgz(archive: Path) -> Iterator[File]:
    with archive.open("rb") as file:
        yield from _files_of_tar(file)


def _files_of_tar(file: IO[bytes]) -> Iterator[File]:
    """Of links, the content of what they point to inside the archive."""
    size = os.fstat(file.fileno()).st_size
    with tarfile.open(fileobj=file, mode="r:*") as tar:
        for member in tar:
            if member.isfile() or member.islnk() or member.issym():
                try:
                    content = tar.extractfile(member)
                except KeyError:  # a link to something that is not in the archive
                    continue
                if content is not None:
                    yield member.name, content, file.tell() / size


def _files_of_deb(archive: Path) -> Iterator[File]:
    """A .deb is an `ar` archive whose member data.tar.* holds the files."""
    with tempfile.TemporaryFile(dir=archive.parent) as packed, tempfile.TemporaryFile(dir=archive.parent) as data:
        with archive.open("rb") as file:
            ending = _copy_data_member(file, packed)
        packed.seek(0)
        if ending == "zst":  # Python reads it from 3.14 on
            _decompress_with_dpkg(archive, data)
        else:
            # Before its members are looked at: each link back would decompress everything from the start again.
            with DECOMPRESSORS[ending](packed) as plain:
                shutil.copyfileobj(plain, data, 1 << 20)
        data.seek(0)
        yield from _files_of_tar(data)


def _copy_data_member(file: IO[bytes], target: IO[bytes]) -> str:
    """Copy data.tar.X and answer X."""
    if file.read(len(AR_MAGIC)) != AR_MAGIC:
        raise ValueError("not a Debian package")
    while header := file.read(AR_HEADER_BYTES):
        name, size = header[:16].decode("ascii", "replace").strip().rstrip("/"), int(header[48:58])
        if name.startswith("data.tar"):
            ending = name.rpartition(".")[2]
            if ending not in (*DECOMPRESSORS, "zst"):
                raise ValueError(f"{name} is packed in an unknown way")
            _copy_bytes(file, target, size)
            return ending
        file.seek(size + size % 2, os.SEEK_CUR)
    raise ValueError("no data.tar in it")


def _copy_bytes(file: IO[bytes], target: IO[bytes], size: int) -> None:
    while size:
        block = file.read(min(size, 1 << 20))
        if not block:
            raise EOFError("the file is cut off")
        target.write(block)
        size -= len(block)


def _decompress_with_dpkg(archive: Path, target: IO[bytes]) -> None:
    tool = shutil.which("dpkg-deb")
    if tool is None:
        raise RunFailed(f"{archive}: is packed with zstd, which dpkg-deb unpacks; install dpkg")
    if subprocess.run([tool, "--fsys-tarfile", str(archive)], stdout=target, check=False).returncode:
        raise ValueError("dpkg-deb failed")
