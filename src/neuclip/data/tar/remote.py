"""Lists and downloads remote shards through fsspec. Whole shards are kept in a cache of limited size on this disk; the
least recently used are removed first."""

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
PARALLEL_REQUESTS = 8  # each request spends most of its time waiting
SLOWEST = 100_000  # bytes per second on average; a shard of 1 GB may take three hours
CONTINUE = "a run that has begun continues with --resume"
KILLED_SECONDS = 3600  # an unfinished download this old was left by a killed process
VERSIONS = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}


@dataclass(frozen=True)
class Limits:
    """Limits on the disk space, time and attempts that remote data may take."""

    cache_size: int = 64_000_000_000  # bytes of disk
    timeout: float = 60.0  # seconds without data before a download is retried
    attempts: int = 5
    first_wait: float = 1.0  # seconds between the first two attempts; each further wait is twice as long


@dataclass(frozen=True)
class RemoteShard:
    """One remote shard. `version` changes when the shard is written again, if the server reports this."""

    url: str
    size: int  # bytes; -1: unknown
    version: str

    @property
    def name(self) -> str:
        return posixpath.basename(without_query(self.url))

    @property
    def key(self) -> str:
        """A name for one version of one file. The URL's query is ignored as a signature if there is a version: without
        one, the query may be all that distinguishes files."""
        url = without_query(self.url) if self.version else self.url
        return hashlib.sha256(f"{url}\n{self.size}\n{self.version}".encode()).hexdigest()[:16]


class RemoteNotFound(RunFailed):
    """The server answered that there is no such file, or that access is denied. A retry would not help."""


def file_system(url: str, timeout: float) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path of the file in it. Each thread and process must call this itself.

    fsspec's own `url_to_fs` is not used: it follows chains (a::b) to file systems that execute what they read."""
    protocol = check_protocol(url)
    try:
        import fsspec

        kind = fsspec.get_filesystem_class(protocol)
        options = kind._get_kwargs_from_urls(url)  # host, user and the like, if they are part of the URL
        if protocol in ("http", "https"):
            import aiohttp

            # By default, aiohttp stops every download after five minutes, even if data arrive.
            patience = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
            options |= {"client_kwargs": {"timeout": patience}}
        return fsspec.filesystem(protocol, **options), kind._strip_protocol(url)
    except ImportError as error:
        package = PACKAGES.get(protocol, "huggingface_hub" if protocol == "hf" else "")
        command = f"pip install {package}" if package else install_command("remote")
        raise MissingPackage(f"{without_query(url)}: {error}; install with: {command}") from error


def with_retries(url: str, request: Callable[[Any, str], T], limits: Limits) -> T:
    """The result of `request(file system, path)`, which is retried if it fails. Raises RemoteNotFound at once, and
    RunFailed after the last attempt; both are one line with the URL."""
    shown, failure = without_query(url), ""
    for number in range(limits.attempts):
        time.sleep(limits.first_wait * 2 ** (number - 1) if number else 0)
        try:
            return request(*file_system(url, limits.timeout))
        except (UserError, RunFailed):
            raise
        except Exception as error:  # each file system has its own errors
            # For HTTP, fsspec raises FileNotFoundError for every failure; its cause is the true error.
            cause = (error.__cause__ or error) if url.startswith("http") else error
            status = getattr(cause, "status", None)
            if status in (404, 410) or isinstance(cause, FileNotFoundError):
                raise RemoteNotFound(
                    f"{shown}: there is no such file; check the URL, or restore the file; {CONTINUE}"
                ) from error
            if status in (401, 403) or isinstance(cause, PermissionError) or "Credentials" in type(cause).__name__:
                raise RemoteNotFound(f"{shown}: access is denied; check your credentials for it; {CONTINUE}") from error
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise RunFailed(
                    f"{shown}: no space for it in {cache_folder()} ({error.strerror}); free some space, lower "
                    "--data.cache_size, or set NEUCLIP_CACHE to another disk; then continue with --resume"
                ) from error
            failure = without_query(" ".join(f"{type(cause).__name__}: {cause}".split()).rstrip(": "))
    raise RunFailed(
        f"{shown}: could not be fetched in {limits.attempts} attempts ({failure}); check the connection and the "
        f"server, then start again; {CONTINUE}"
    )


def list_shards(addresses: Sequence[str], limits: Limits) -> list[RemoteShard]:
    """The shards of remote data paths, in order. Each is a file or a brace pattern, or in a bucket also a folder or a
    pattern with stars."""
    urls = [url for address in addresses for url in expand_braces(address)]
    try:
        if not all(without_query(url).lower().endswith(SHARD_SUFFIXES) and "*" not in url for url in urls):
            return [shard for url in urls for shard in _shards_in(url, limits)]
        host = "/".join(without_query(urls[0]).split("/")[:3])
        with ThreadPool(PARALLEL_REQUESTS) as pool:
            results = pool.imap(lambda url: with_retries(url, lambda system, path: system.info(path), limits), urls)
            infos = list(track(results, f"asking {host} for sizes", len(urls), "shards"))
        return [_shard(url, info) for url, info in zip(urls, infos, strict=True)]
    except RemoteNotFound as error:
        raise UserError(str(error).removesuffix(f"; {CONTINUE}")) from error


def _shards_in(url: str, limits: Limits) -> list[RemoteShard]:
    """The shards in a remote folder and one level below, or of a pattern with stars, sorted."""
    if url.startswith("http"):
        raise UserError(
            f"{without_query(url)}: folders of web servers cannot be listed; give a pattern such as "
            ".../{00000..00019}.tar"
        )

    def list_files(system: Any, path: str) -> dict[str, Any]:
        infos = system.glob(path, detail=True) if "*" in path else system.find(path, maxdepth=2, detail=True)
        return {system.unstrip_protocol(name): info for name, info in infos.items()}

    files = with_retries(url, list_files, limits)
    shards = [name for name in sorted(files) if name.lower().endswith(SHARD_SUFFIXES) and "/." not in name]
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
    return [_shard(name, files[name]) for name in shards]


def _shard(url: str, info: dict[str, Any]) -> RemoteShard:
    size = info.get("size")
    version = next((str(info[field]) for field in VERSIONS if info.get(field)), "")
    return RemoteShard(url, -1 if size is None else int(size), version)


def fetch(url: str, file: Path, size: int, max_bytes: int, limits: Limits) -> None:
    """Download a file completely. It must have `size` bytes (-1: unknown), and at most `max_bytes` are accepted."""
    from fsspec.callbacks import Callback

    too_large = RunFailed(
        f"data.cache_size {max_bytes:,} is too small: {without_query(url)} has more bytes; give a larger "
        "--data.cache_size, or check the server"
    )

    start = 0.0

    class Bounds(Callback):
        """Stops a download that is too large or too slow. fsspec calls it whenever bytes have arrived."""

        def call(self, hook_name: str | None = None, **arguments: Any) -> None:
            if self.value > max_bytes:
                raise too_large
            if size >= 0 and self.value > size:
                raise OSError(f"received more than {size:,} bytes")
            if time.monotonic() > start + limits.timeout + self.value / SLOWEST:
                raise TimeoutError(f"received fewer than {SLOWEST:,} bytes per second")

    def download(system: Any, path: str) -> None:
        nonlocal start
        start = time.monotonic()
        system.get_file(path, str(file), callback=Bounds())
        received = file.stat().st_size
        if size >= 0 and received != size:
            raise OSError(f"received {received:,} of {size:,} bytes")
        if received > max_bytes:  # for local copies, fsspec does not call Bounds
            raise too_large

    if size > max_bytes:
        raise too_large
    with_retries(url, download, limits)


class ShardCache:
    """The local copies of remote shards. All processes on this machine share one folder, and download each shard once.
    A process that has a shard open can still read it after the shard is removed from the cache. `check(shard, file)`
    checks each download before it is added."""

    def __init__(self, limits: Limits, check: Callable[[RemoteShard, Path], None] | None = None):
        self.folder, self.limits, self.check = cache_folder() / "shards", limits, check
        self._wanted: list[RemoteShard] = []
        self._thread: threading.Thread | None = None

    def path_of(self, shard: RemoteShard) -> Path:
        """The path of the shard's local copy, a plain tar. Each version of the shard has its own path."""
        return self.folder / f"{shard.key}-{PACKED_TAR.sub('.tar', shard.name)}"

    def open(self, shard: RemoteShard) -> BinaryIO:
        """Open the local copy, downloaded if necessary. Retries, because another process may remove the shard just
        after it was downloaded."""
        path = self.path_of(shard)
        for _ in range(100):
            if not mark_used(path):
                self._fetch(shard)
            with contextlib.suppress(FileNotFoundError):
                return open_regular(path)
        raise RunFailed(
            f"{without_query(shard.url)}: is removed from {self.folder} as soon as it is there; give every run on this "
            f"machine a larger --data.cache_size than {self.limits.cache_size}"
        )

    def prefetch(self, shards: Sequence[RemoteShard]) -> None:
        """Download these shards in the background, in this order. Earlier requests that did not start are dropped."""
        self._wanted = [shard for shard in shards if not mark_used(self.path_of(shard))]
        if self._wanted and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._fetch_wanted, name="fetch shards", daemon=True)
            self._thread.start()

    def _fetch_wanted(self) -> None:
        while self._wanted:
            # Errors are ignored here: `open` will try again and report them.
            with contextlib.suppress(RunFailed, UserError, OSError, IndexError):
                self._fetch(self._wanted.pop(0))

    def _fetch(self, shard: RemoteShard) -> None:
        """Download a shard to its path, atomically. Other processes on this machine that need it wait."""
        path = self.path_of(shard)
        try:
            with lock(self.folder / "locks" / shard.key[:2]):
                if mark_used(path):
                    return
                with new_file(path) as file:
                    self._download(shard, Path(file.name))
                    if self.check:
                        self.check(shard, Path(file.name))
            self._evict(path)
        except OSError as error:  # otherwise the sample would count as bad
            raise RunFailed(
                f"{self.folder}: cannot be written ({error.strerror or error}); set NEUCLIP_CACHE to a writable "
                "folder, then continue with --resume"
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
        """Remove the least recently used shards until the cache has its allowed size; `newest` stays."""
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
