"""Files at addresses such as s3://bucket/00000.tar: listed and downloaded through fsspec, with a limit on retries."""

from __future__ import annotations

import contextlib
import posixpath
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar

from neuclip.data.locations import INDEX_SUFFIX, SHARD_SUFFIXES, check_protocol, expand_braces, without_packed_twins
from neuclip.data.splits import BUILD_NOTES, refuse_several_parts
from neuclip.data.tar.files import NO_ROOM, unfinished_file
from neuclip.errors import RunFailed, UserError
from neuclip.progress import track
from neuclip.secrets import without_query

T = TypeVar("T")
TOGETHER = 8  # requests at a time: most of the time of each is waiting
SLOWEST = 10_000  # bytes per second on average; at a hundred a shard would take a year
MOST_LISTED_BYTES = 64 << 20  # of a web page of links: a million names
VERSION_FIELDS = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class Limits:
    """What remote data may cost."""

    cache_size: int = 64_000_000_000  # bytes of disk
    stall_seconds: float = 60.0  # without data before a try counts as failed, however long the whole file takes
    attempts: int = 5
    first_wait: float = 1.0  # seconds between the first two tries; each further wait is twice as long


@dataclass(frozen=True)
class RemoteShard:
    """One shard at the remote. `version` changes when it is written again, if the remote says so."""

    url: str
    size: int  # bytes; -1: the remote does not say
    version: str
    index_beside: bool | None = None  # None: not known

    @property
    def name(self) -> str:
        return posixpath.basename(without_query(self.url))


class Gone(RunFailed):
    """The remote answered that there is no such file, or not for you. Asking again would not help."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message  # as it is said while no run has begun

    def __str__(self) -> str:
        return f"{self.message}; a run that has begun continues with --resume"


class TooLarge(RunFailed):
    """More bytes than may be kept."""

    def __init__(self, url: str, size: int, most: int):
        super().__init__(
            f"data.cache_size {most:,} is too small: {without_query(url)} has {size:,} bytes or more; give a larger "
            "--data.cache_size, or check the server"
        )


class Attempt:
    """One try of a download: how many bytes have come. fsspec counts them, the waiting side looks whether they grow."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.bytes = 0
        self.file: Path | None = None  # that this try alone writes
        self.abandoned = False

    def bytes_so_far(self) -> int:
        if self.file is not None and self.file.exists():
            return max(self.bytes, self.file.stat().st_size)  # nobody counts the bytes of local copies
        return self.bytes

    def is_slow(self, stall_seconds: float) -> bool:
        """Bytes that trickle in never stall, and never end either."""
        return time.monotonic() - self.started > stall_seconds + self.bytes_so_far() / SLOWEST

    def abandon(self) -> None:
        """Nobody waits for it any more: it ends at its next bytes."""
        self.abandoned = True
        self.remove_file()

    def remove_file(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):  # Windows keeps what a thread still writes; the cache removes it later
                self.file.unlink(missing_ok=True)


def file_system(url: str, limits: Limits) -> tuple[Any, str]:
    """fsspec's file system for an address, and its name for the file. Call it in each thread and process: fsspec keeps
    one file system per process, and one from before a fork would not work.

    Not by fsspec's own `url_to_fs`: that follows chains (a::b) to file systems that evaluate what they read."""
    protocol = check_protocol(url)
    try:
        import fsspec

        kind = fsspec.get_filesystem_class(protocol)
        options = kind._get_kwargs_from_urls(url)  # host, user and the like, where they are part of the address
        if protocol in ("http", "https"):
            options |= {"client_kwargs": _client_options(limits)}
        return fsspec.filesystem(protocol, **options), kind._strip_protocol(url)
    except ImportError as error:
        packages = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
        package = (packages | {"hf": "huggingface_hub"}).get(protocol, "'neuclip[remote]'")
        raise UserError(f"{without_query(url)}: {error}; pip install {package}") from error


def _client_options(limits: Limits) -> dict[str, Any]:
    """Of the client for web servers."""
    import aiohttp

    class BoundedResponse(aiohttp.ClientResponse):
        """fsspec reads a page of links as one text, however long it is."""

        async def text(self, encoding: str | None = None, errors: str = "replace") -> str:
            content = bytearray()
            async for chunk in self.content.iter_any():
                content += chunk
                if len(content) > MOST_LISTED_BYTES:
                    self.close()
                    raise UserError(
                        f"{without_query(str(self.url))}: is no page of links, more than {MOST_LISTED_BYTES:,} bytes "
                        "came; give a pattern such as .../{00000..00019}.tar"
                    )
            return content.decode(encoding or self.charset or "utf-8", errors)

    # Its default ends every download after five minutes, however well it goes.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=limits.stall_seconds, sock_read=limits.stall_seconds)
    return {"timeout": timeout, "response_class": BoundedResponse}


def retry(url: str, action: Callable[[Attempt], T], limits: Limits, folder: Path | None = None) -> T:
    """What `action` returns, tried several times. Raises Gone at once and RunFailed in the end, both in one line with
    the URL. `folder` is where it writes."""
    shown, failure = without_query(url), ""
    for number in range(limits.attempts):
        if number:
            time.sleep(limits.first_wait * 2 ** (number - 1))
        try:
            return _run(action, limits.stall_seconds)
        except (UserError, RunFailed):
            raise
        except Exception as error:  # each file system has errors of its own
            cause = _cause(url, error)
            if reason := _why_useless(cause):
                raise Gone(f"{shown}: {reason}") from error
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise RunFailed(
                    f"{shown}: no room for it in {folder} ({error.strerror}); make room, lower --data.cache_size, or "
                    "point NEUCLIP_CACHE to another disk; then continue with --resume"
                ) from error
            failure = without_query(" ".join(f"{type(cause).__name__}: {cause}".split()).rstrip(": "))
    raise RunFailed(
        f"{shown}: could not be fetched in {limits.attempts} tries ({failure}); check the connection and the "
        "server, then start again (a run that has begun continues with --resume)"
    )


def _run(action: Callable[[Attempt], T], stall_seconds: float) -> T:
    """Run it in a thread that can be abandoned: no file system promises to return."""
    attempt, future = Attempt(), Future[T]()

    def run() -> None:
        try:
            future.set_result(action(attempt))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        before = 0
        while not wait([future], stall_seconds).done:
            if (now := attempt.bytes_so_far()) == before:
                raise TimeoutError(f"nothing came for {stall_seconds:g} s")
            if attempt.is_slow(stall_seconds):
                raise TimeoutError(f"fewer than {SLOWEST:,} bytes per second came")
            before = now
    except BaseException:
        attempt.abandon()
        raise
    return future.result()


def ask(url: str, question: Callable[[Any, str], T], limits: Limits) -> T:
    """The answer of `question(file system, path)`, asked several times if need be."""
    return retry(url, lambda attempt: question(*file_system(url, limits)), limits)


def _why_useless(cause: BaseException) -> str:
    """Why it is useless to ask again; "" if it is not."""
    status = getattr(cause, "status", None)
    if status in (404, 410) or isinstance(cause, FileNotFoundError):
        return "there is no such file; check the address, or bring it back"
    if status in (401, 403) or isinstance(cause, PermissionError) or type(cause).__name__ == "NoCredentialsError":
        return "access is denied; check your credentials for it"
    return ""


def _cause(url: str, error: Exception) -> BaseException:
    """For HTTP, fsspec raises "not found" for every failure; the cause of that is the true error."""
    return (error.__cause__ or error) if url.startswith(("http://", "https://")) else error


def fetch(url: str, place: Path, size: int, limits: Limits, show: Callable[[int], None] | None = None) -> Path:
    """Download the whole file; `size` is what it must have, -1 if that is unknown: it then ends at the size of the
    cache. Returns a new file beside `place`, for the caller to move there. Each try has its own file: the thread of one
    that stalled may wake at any time."""
    if size > limits.cache_size:
        raise TooLarge(url, size, limits.cache_size)

    def note(attempt: Attempt, bytes_: int) -> None:
        if attempt.abandoned:
            raise TimeoutError("abandoned")
        attempt.bytes = bytes_
        if size >= 0 and bytes_ > size:
            raise OSError(f"more than {size:,} bytes came")
        if bytes_ > limits.cache_size:
            raise TooLarge(url, bytes_, limits.cache_size)
        if show is not None:
            show(bytes_)

    def download(attempt: Attempt) -> Path:
        system, path = file_system(url, limits)
        file = attempt.file = unfinished_file(place)
        try:
            system.get_file(path, str(file), callback=_callback(partial(note, attempt)))
            received = file.stat().st_size
            if size >= 0 and received != size:
                raise OSError(f"{received:,} of {size:,} bytes came")
        except BaseException as error:
            attempt.remove_file()
            if isinstance(error, FileNotFoundError) and error.filename == str(file):
                raise OSError(f"{file} was removed meanwhile") from None  # here, not at the remote
            raise
        if attempt.abandoned:  # before it had a file
            attempt.remove_file()
        return file

    return retry(url, download, limits, place.parent)


def _callback(note: Callable[[int], None]) -> Any:
    from fsspec.callbacks import Callback

    class Counter(Callback):
        def call(self, hook_name: str | None = None, **arguments: Any) -> None:
            note(self.value)

    return Counter()


def remote_shards(address: str | list[str], limits: Limits) -> list[RemoteShard]:
    """The shards that a remote address means, sorted: one file, a pattern with braces or stars, or a folder (and one
    level below). Of a list of addresses one after the other."""
    addresses = [address] if isinstance(address, str) else address
    urls = [url for address in addresses for url in sorted(set(expand_braces(address)))]
    try:
        if all("*" not in url and without_query(url).lower().endswith(SHARD_SUFFIXES) for url in urls):
            return describe_shards(urls, limits)
        return [shard for url in urls for shard in _shards_in(url, limits)]
    except Gone as gone:
        raise UserError(gone.message) from gone


def describe_shards(urls: list[str], limits: Limits) -> list[RemoteShard]:
    """Ask for size and version of each."""
    host = "/".join(without_query(urls[0]).split("/")[:3])
    with ThreadPool(TOGETHER) as pool:
        answers = pool.imap(partial(_describe, limits=limits), urls)
        return list(track(answers, f"asking {host} for sizes", len(urls), "shards"))


def _describe(url: str, limits: Limits) -> RemoteShard:
    return _shard(url, ask(url, lambda system, path: system.info(path), limits))


def _shard(url: str, info: dict[str, Any], index_beside: bool | None = None) -> RemoteShard:
    size = info.get("size")
    version = next((str(info[field]) for field in VERSION_FIELDS if info.get(field)), "")
    return RemoteShard(url, -1 if size is None else int(size), version, index_beside)


def _shards_in(folder: str, limits: Limits) -> list[RemoteShard]:
    """Those of a folder and one level below, or of a pattern with stars."""
    found = ask(folder, _list_files, limits)
    shards = without_packed_twins(
        {url for url in found if url.lower().endswith(SHARD_SUFFIXES) and not posixpath.basename(url).startswith(".")}
    )
    if not shards:
        where = "match this pattern" if "*" in folder else "in this folder or one below"
        raise UserError(
            f"{without_query(folder)}: no tar shards {where}, or it cannot be listed; give a pattern such as "
            ".../{00000..00019}.tar"
        )
    if any(found[url].get("size") is None for url in shards):  # a web page of links has names only
        return describe_shards(sorted(shards), limits)
    if "*" not in folder:
        inside = {url: _path_of(url).removeprefix(_path_of(folder)).lstrip("/") for url in found}
        names = (inside[url] for url in sorted(shards))
        refuse_several_parts(without_query(folder), names, built=BUILD_NOTES in inside.values())
    # A pattern of shards does not match the indexes beside them: whether they are there is not known.
    return [_shard(url, found[url], None if "*" in folder else url + INDEX_SUFFIX in found) for url in sorted(shards)]


def _list_files(system: Any, path: str) -> dict[str, dict[str, Any]]:
    """By URL what the remote tells of each file."""
    found = system.glob(path, detail=True) if "*" in path else system.find(path, maxdepth=2, detail=True)
    return {system.unstrip_protocol(name): info for name, info in found.items()}


def _path_of(url: str) -> str:
    return url.partition("://")[2].strip("/")  # memory://x is listed as memory:///x
