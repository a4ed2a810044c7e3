"""Shards that lie elsewhere: listed and downloaded whole through fsspec, kept on this disk up to a size, the longest
unused removed first."""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from neuclip.data.locations import PACKED as PACKED_TAR
from neuclip.data.locations import SHARD_SUFFIXES, check_protocol, expand_braces, refuse_several_parts
from neuclip.data.tar.source import PACKED, unpack
from neuclip.errors import MissingPackage, RunFailed, UserError, install_command
from neuclip.files import NO_ROOM, UNFINISHED, cache_folder, lock, mark_used, new_file, open_regular, remove_unused
from neuclip.progress import track
from neuclip.secrets import without_query

T = TypeVar("T")
PARALLEL_REQUESTS = 8  # most of the time of each is waiting
SLOWEST = 100_000  # bytes per second on average; a shard of 1 GB may take three hours
CONTINUE = "a run that has begun continues with --resume"
KILLED_SECONDS = 3600  # a download that was not written to for this long belongs to a killed process
VERSIONS = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}


@dataclass(frozen=True)
class Limits:
    """What remote data may cost."""

    cache_size: int = 64_000_000_000  # bytes of disk
    timeout: float = 60.0  # seconds without data before a try counts as failed
    attempts: int = 5
    first_wait: float = 1.0  # seconds between the first two tries; each further wait is twice as long


@dataclass(frozen=True)
class RemoteShard:
    """One shard at the remote. `version` changes when it is written again, if the remote says so."""

    url: str
    size: int  # bytes; -1: the remote does not say
    version: str

    @property
    def name(self) -> str:
        return posixpath.basename(without_query(self.url))

    @property
    def key(self) -> str:
        """Names one version of one file. A query is a signature, as far as a version tells files apart without it."""
        url = without_query(self.url) if self.version else self.url
        return hashlib.sha256(f"{url}\n{self.size}\n{self.version}".encode()).hexdigest()[:16]


class RemoteNotFound(RunFailed):
    """The remote answered that there is no such file, or not for you. Asking again would not help."""


def file_system(url: str, timeout: float) -> tuple[Any, str]:
    """fsspec's file system for an address, and its name for the file; in each thread and process anew.

    Not by fsspec's own `url_to_fs`: that follows chains (a::b) to file systems that evaluate what they read."""
    protocol = check_protocol(url)
    try:
        import fsspec

        kind = fsspec.get_filesystem_class(protocol)
        options = kind._get_kwargs_from_urls(url)  # host, user and the like, where they are part of the address
        if protocol in ("http", "https"):
            import aiohttp

            # aiohttp's default ends every download after five minutes, however well it goes.
            patience = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
            options |= {"client_kwargs": {"timeout": patience}}
        return fsspec.filesystem(protocol, **options), kind._strip_protocol(url)
    except ImportError as error:
        package = PACKAGES.get(protocol, "huggingface_hub" if protocol == "hf" else "")
        command = f"pip install {package}" if package else install_command("remote")
        raise MissingPackage(f"{without_query(url)}: {error}; install with: {command}") from error


def with_retries(url: str, question: Callable[[Any, str], T], limits: Limits) -> T:
    """The answer of `question(file system, path)`, asked several times if need be. Raises RemoteNotFound at once and
    RunFailed in the end, both in one line with the address."""
    shown, failure = without_query(url), ""
    for number in range(limits.attempts):
        time.sleep(limits.first_wait * 2 ** (number - 1) if number else 0)
        try:
            return question(*file_system(url, limits.timeout))
        except (UserError, RunFailed):
            raise
        except Exception as error:  # each file system has errors of its own
            # For HTTP, fsspec raises "not found" for every failure; the cause of that is the true error.
            cause = (error.__cause__ or error) if url.startswith("http") else error
            status = getattr(cause, "status", None)
            if status in (404, 410) or isinstance(cause, FileNotFoundError):
                raise RemoteNotFound(
                    f"{shown}: there is no such file; check the address, or bring it back; {CONTINUE}"
                ) from error
            if status in (401, 403) or isinstance(cause, PermissionError) or "Credentials" in type(cause).__name__:
                raise RemoteNotFound(f"{shown}: access is denied; check your credentials for it; {CONTINUE}") from error
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise RunFailed(
                    f"{shown}: no room for it in {cache_folder()} ({error.strerror}); make room, lower "
                    "--data.cache_size, or point NEUCLIP_CACHE to another disk; then continue with --resume"
                ) from error
            failure = without_query(" ".join(f"{type(cause).__name__}: {cause}".split()).rstrip(": "))
    raise RunFailed(
        f"{shown}: could not be fetched in {limits.attempts} tries ({failure}); check the connection and the server, "
        f"then start again; {CONTINUE}"
    )


def list_shards(addresses: Sequence[str], limits: Limits) -> list[RemoteShard]:
    """The shards that remote addresses mean, in this order: files, brace patterns, and in buckets folders and stars."""
    urls = [url for address in addresses for url in expand_braces(address)]
    try:
        if not all(without_query(url).lower().endswith(SHARD_SUFFIXES) and "*" not in url for url in urls):
            return [shard for url in urls for shard in _shards_in(url, limits)]
        host = "/".join(without_query(urls[0]).split("/")[:3])
        with ThreadPool(PARALLEL_REQUESTS) as pool:
            asked = pool.imap(lambda url: with_retries(url, lambda system, path: system.info(path), limits), urls)
            infos = list(track(asked, f"asking {host} for sizes", len(urls), "shards"))
        return [_shard(url, info) for url, info in zip(urls, infos, strict=True)]
    except RemoteNotFound as error:
        raise UserError(str(error).removesuffix(f"; {CONTINUE}")) from error


def _shards_in(url: str, limits: Limits) -> list[RemoteShard]:
    """Those of a folder and one level below, or of a pattern with stars, sorted."""
    if url.startswith("http"):
        raise UserError(
            f"{without_query(url)}: folders of web servers are not listed; give a pattern such as "
            ".../{00000..00019}.tar"
        )

    def list_files(system: Any, path: str) -> dict[str, Any]:
        found = system.glob(path, detail=True) if "*" in path else system.find(path, maxdepth=2, detail=True)
        return {system.unstrip_protocol(name): info for name, info in found.items()}

    found = with_retries(url, list_files, limits)
    shards = [name for name in sorted(found) if name.lower().endswith(SHARD_SUFFIXES) and "/." not in name]
    shards = [name for name in shards if (plain := PACKED_TAR.sub(".tar", name)) == name or plain not in shards]
    if not shards:
        raise UserError(
            f"{without_query(url)}: no tar shards there, or it cannot be listed; give a pattern such as "
            ".../{00000..00019}.tar"
        )
    if "*" not in url:
        folder = url.partition("://")[2].strip("/")  # memory://x is listed as memory:///x
        inside = (name.partition("://")[2].strip("/").removeprefix(folder).lstrip("/") for name in shards)
        refuse_several_parts(without_query(url), inside)
    return [_shard(name, found[name]) for name in shards]


def _shard(url: str, info: dict[str, Any]) -> RemoteShard:
    size = info.get("size")
    version = next((str(info[field]) for field in VERSIONS if info.get(field)), "")
    return RemoteShard(url, -1 if size is None else int(size), version)


def fetch(url: str, file: Path, size: int, most: int, limits: Limits) -> None:
    """Download the whole file. `size` is what it must have, -1 if that is unknown; it never gets more than `most`."""
    from fsspec.callbacks import Callback

    too_large = RunFailed(
        f"data.cache_size {most:,} is too small: {without_query(url)} has more bytes; give a larger --data.cache_size, "
        "or check the server"
    )

    start = 0.0

    class Bounds(Callback):
        """Called by fsspec whenever bytes have come."""

        def call(self, hook_name: str | None = None, **arguments: Any) -> None:
            if self.value > most:
                raise too_large
            if size >= 0 and self.value > size:
                raise OSError(f"more than {size:,} bytes came")
            if time.monotonic() > start + limits.timeout + self.value / SLOWEST:
                raise TimeoutError(f"fewer than {SLOWEST:,} bytes per second came")

    def download(system: Any, path: str) -> None:
        nonlocal start
        start = time.monotonic()
        system.get_file(path, str(file), callback=Bounds())
        received = file.stat().st_size
        if size >= 0 and received != size:
            raise OSError(f"{received:,} of {size:,} bytes came")
        if received > most:  # nobody counts the bytes of local copies
            raise too_large

    if size > most:
        raise too_large
    with_retries(url, download, limits)


class ShardCache:
    """All sources of a machine share one folder, and do each download once. A shard that is removed while a process
    reads it stays readable there: the file goes, not its bytes. `check(shard, file)` looks at each download before it
    counts as there."""

    def __init__(self, limits: Limits, check: Callable[[RemoteShard, Path], None] | None = None):
        self.folder, self.limits, self.check = cache_folder() / "shards", limits, check
        self._wanted: list[RemoteShard] = []
        self._thread: threading.Thread | None = None

    def path_of(self, shard: RemoteShard) -> Path:
        """Where the shard is, as a plain tar, once it is here. Another version of it has another place."""
        return self.folder / f"{shard.key}-{PACKED_TAR.sub('.tar', shard.name)}"

    def open(self, shard: RemoteShard) -> BinaryIO:
        """Fetched if need be. Another process may remove the shard just after it came."""
        place = self.path_of(shard)
        for _ in range(100):
            if not mark_used(place):
                self._fetch(shard)
            with contextlib.suppress(FileNotFoundError):
                return open_regular(place)
        raise RunFailed(
            f"{without_query(shard.url)}: is removed from {self.folder} as soon as it is there; give more than "
            f"--data.cache_size {self.limits.cache_size}, to every run on this machine"
        )

    def prefetch(self, shards: Sequence[RemoteShard]) -> None:
        """Fetch these in the background, in this order. What was wanted before and is not begun is dropped."""
        self._wanted = [shard for shard in shards if not mark_used(self.path_of(shard))]
        if self._wanted and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._fetch_wanted, name="fetch shards", daemon=True)
            self._thread.start()

    def _fetch_wanted(self) -> None:
        while self._wanted:
            # Whoever needs the shard tries again and says why it cannot be fetched.
            with contextlib.suppress(RunFailed, UserError, OSError, IndexError):
                self._fetch(self._wanted.pop(0))

    def _fetch(self, shard: RemoteShard) -> None:
        """In one move: a shard is whole or not there. The other processes of this machine wait for it."""
        place = self.path_of(shard)
        try:
            with lock(self.folder / "locks" / shard.key[:2]):
                if mark_used(place):
                    return
                with new_file(place) as file:
                    self._download(shard, Path(file.name))
                    if self.check:
                        self.check(shard, Path(file.name))
            self._evict(place)
        except OSError as error:  # which readers would take for a bad sample
            raise RunFailed(
                f"{self.folder}: cannot be written ({error.strerror or error}); point NEUCLIP_CACHE to a folder that "
                "can, then continue with --resume"
            ) from error

    def _download(self, shard: RemoteShard, file: Path) -> None:
        if not shard.name.lower().endswith(PACKED):
            fetch(shard.url, file, shard.size, self.limits.cache_size, self.limits)
            return
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".packed.", suffix=UNFINISHED) as packed:
            fetch(shard.url, Path(packed.name), shard.size, self.limits.cache_size, self.limits)
            with open_regular(Path(packed.name)) as content, file.open("wb") as plain:
                try:
                    unpack(content, plain, without_query(shard.url), self.limits.cache_size)
                except UserError as error:
                    raise RunFailed(str(error)) from error

    def _evict(self, newest: Path) -> None:
        with lock(self.folder / "locks" / "evict"):
            remove_unused(self.folder.glob(f".*{UNFINISHED}"), KILLED_SECONDS)
            files = []
            for path in self.folder.glob("[!.]*.tar"):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
            total = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total > self.limits.cache_size and path != newest:
                    path.unlink(missing_ok=True)
                    total -= size

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "limits": self.limits, "check": self.check, "_wanted": [], "_thread": None}
