"""Files at addresses such as s3://bucket/00000.tar: listed and fetched through fsspec, with patience that ends."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar

from neuclip.data.locations import INDEX_SUFFIX, SHARD_SUFFIXES, expand_braces, without_packed_twins
from neuclip.data.splits import BUILD_NOTES, refuse_several_parts
from neuclip.errors import RunFailed, UserError
from neuclip.progress import track
from neuclip.settings.secrets import without_query

T = TypeVar("T")
IN_MID_RUN = "; a run that has begun continues with --resume"
TOGETHER = 8  # requests at a time: most of each one's time is waiting
VERSION_FIELDS = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class Limits:
    """What remote data may cost. A remote has failed after `attempts` tries, with waits between them that double from
    `first_wait` seconds on; a try fails when nothing comes for `stall_seconds`, however long the whole file takes."""

    cache_size: int = 64_000_000_000  # bytes of disk
    stall_seconds: float = 60.0
    attempts: int = 5
    first_wait: float = 1.0


@dataclass(frozen=True)
class RemoteShard:
    """One shard where it lies. `version` changes when it is written again, as far as the remote tells."""

    url: str
    size: int  # bytes; -1: the remote does not say
    version: str
    index_beside: bool | None = None  # None: not known

    @property
    def name(self) -> str:
        return posixpath.basename(without_query(self.url))


class Gone(RunFailed):
    """The remote answered: there is no such file, or not for you. Asking again would not help."""


class Watch:
    """How many bytes of one try have come. Called by fsspec; the waiting side looks whether the number still grows."""

    def __init__(self) -> None:
        self.bytes = 0
        self.file: Path | None = None  # that this try alone writes
        self.left_behind = False

    def so_far(self) -> int:
        if self.file is not None and self.file.exists():
            return max(self.bytes, self.file.stat().st_size)  # local copies call nobody
        return self.bytes

    def leave_behind(self) -> None:
        """Nobody waits for this try any more: it ends at its next bytes, and its file goes."""
        self.left_behind = True
        self.remove_file()

    def remove_file(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):  # Windows keeps what a thread still writes; the cache sweeps it later
                self.file.unlink(missing_ok=True)


def file_system(url: str, limits: Limits) -> tuple[Any, str]:
    """fsspec's file system for an address, and its name for the file. Asked for anew by each thread and process: fsspec
    keeps one per process, and one from before a fork would not work."""
    options: dict[str, Any] = {}
    try:
        import fsspec

        if url.startswith(("http://", "https://")):
            import aiohttp

            # Its default ends every download after five minutes, however well it goes.
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=limits.stall_seconds, sock_read=limits.stall_seconds
            )
            options = {"client_kwargs": {"timeout": timeout}}
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}.get(url.partition("://")[0], "'neuclip[remote]'")
        raise UserError(f"{without_query(url)}: {error}; pip install {package}") from error
    except ValueError as error:  # an unknown protocol
        raise UserError(f"{without_query(url)}: {error}; give s3://, gs://, https:// or a local path") from error


def retry(url: str, action: Callable[[Watch], T], limits: Limits, folder: Path | None = None) -> T:
    """What `action` returns, tried several times. Raises Gone at once, RunFailed in the end: one line with the URL.
    `folder` is where it writes."""
    failure = ""
    for attempt in range(limits.attempts):
        if attempt:
            time.sleep(limits.first_wait * 2 ** (attempt - 1))
        try:
            return watched(action, Watch(), limits.stall_seconds)
        except (UserError, RunFailed):
            raise
        except Exception as error:  # each file system has errors of its own
            cause = _cause(url, error)
            verdict = _final(cause)
            if verdict:
                raise Gone(f"{without_query(url)}: {verdict}{IN_MID_RUN}") from error
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise RunFailed(
                    f"{without_query(url)}: no room for it in {folder} ({error.strerror}); make "
                    "room, lower --data.cache_size, or point NEUCLIP_CACHE to another disk; then continue with --resume"
                ) from error
            failure = _told(cause)
    raise RunFailed(
        f"{without_query(url)}: could not be fetched in {limits.attempts} tries ({failure}); check the connection and "
        "the server, then start again (a run that has begun continues with --resume)"
    )


def watched(action: Callable[[Watch], T], watch: Watch, stall_seconds: float) -> T:
    """Run it in a thread that can be left behind: no file system promises to come back."""
    outcome: list[Any] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.extend((action(watch), None))
        except BaseException as error:
            outcome.extend((None, error))
        done.set()

    threading.Thread(target=run, daemon=True).start()
    try:
        before = watch.so_far()
        while not done.wait(stall_seconds):
            if (now := watch.so_far()) == before:
                raise TimeoutError(f"nothing came for {stall_seconds:g} s")
            before = now
    except BaseException:
        watch.leave_behind()
        raise
    result, error = outcome
    if error is not None:
        raise error
    return result


def _final(cause: BaseException) -> str:
    """Why it is useless to ask again; "" if it is not."""
    status = getattr(cause, "status", None)
    if status in (404, 410) or isinstance(cause, FileNotFoundError):
        return "there is no such file; check the address, or bring it back"
    if status in (401, 403) or isinstance(cause, PermissionError) or type(cause).__name__ == "NoCredentialsError":
        return "access is denied; check your credentials for it"
    return ""


def _cause(url: str, error: Exception) -> BaseException:
    """For HTTP, fsspec says "not found" whatever happened, and the cause is the truth; s3fs and others say it right."""
    return (error.__cause__ or error) if url.startswith(("http://", "https://")) else error


def _told(cause: BaseException) -> str:
    """In one line and without the secrets of a signed address."""
    return without_query(" ".join(f"{type(cause).__name__}: {cause}".split()).rstrip(": "))


def fetch(url: str, place: Path, size: int, limits: Limits, show: Callable[[int], None] | None = None) -> Path:
    """Download the whole file; `size` is what it must have, -1 if that is unknown. Returns where it lies: in a new file
    beside `place`, for the caller to move there. Each try has a file of its own, because the thread of one that stalled
    may wake at any time and write on."""

    def download(watch: Watch) -> Path:
        system, path = file_system(url, limits)
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.", suffix=".part")
        os.close(handle)
        watch.file = Path(name)
        try:
            system.get_file(path, name, callback=_callback(watch, show))
            got = watch.file.stat().st_size
            if size >= 0 and got != size:
                raise OSError(f"{got:,} of {size:,} bytes came")
        except BaseException as error:
            watch.remove_file()
            if isinstance(error, FileNotFoundError) and error.filename == name:
                raise OSError(f"{name} was removed meanwhile") from None  # here, not at the remote
            raise
        if watch.left_behind:  # and opened its file only after that was removed
            watch.remove_file()
        return watch.file

    return retry(url, download, limits, place.parent)


def _callback(watch: Watch, show: Callable[[int], None] | None) -> Any:
    from fsspec.callbacks import Callback

    class Counting(Callback):
        def call(self, hook_name: str | None = None, **arguments: Any) -> None:
            if watch.left_behind:
                raise TimeoutError("left behind")
            watch.bytes = self.value
            if show is not None:
                show(self.value)

    return Counting()


def fetch_bytes(url: str, limits: Limits) -> bytes:
    """A small file as a whole."""

    def read(watch: Watch) -> bytes:
        system, path = file_system(url, limits)
        return system.cat_file(path)

    return retry(url, read, limits)


def remote_shards(address: str | list[str], limits: Limits) -> list[RemoteShard]:
    """The shards that a remote address means, sorted: one file, a pattern with braces or stars, or a folder (and one
    level below). Of a list of addresses one after the other."""
    addresses = [address] if isinstance(address, str) else address
    urls = [url for address in addresses for url in sorted(set(expand_braces(address)))]
    try:
        if all("*" not in url and without_query(url).lower().endswith(SHARD_SUFFIXES) for url in urls):
            return described_shards(urls, limits)
        return [shard for url in urls for shard in _shards_in(url, limits)]
    except Gone as gone:
        raise asked_for(gone) from gone


def asked_for(gone: Gone) -> UserError:
    """As it is told when data are opened and no run has begun."""
    return UserError(str(gone).removesuffix(IN_MID_RUN))


def described_shards(urls: list[str], limits: Limits) -> list[RemoteShard]:
    """Ask for size and version of each."""
    with ThreadPool(TOGETHER) as pool:
        answers = pool.imap(partial(_described, limits=limits), urls)
        return list(track(answers, f"asking {_host(urls[0])} for sizes", len(urls), "shards"))


def _described(url: str, limits: Limits) -> RemoteShard:
    def ask(watch: Watch) -> dict[str, Any]:
        system, path = file_system(url, limits)
        return system.info(path)

    return _shard(url, retry(url, ask, limits))


def _shard(url: str, info: dict[str, Any], index_beside: bool | None = None) -> RemoteShard:
    size = info.get("size")
    version = next((str(info[field]) for field in VERSION_FIELDS if info.get(field)), "")
    return RemoteShard(url, -1 if size is None else int(size), version, index_beside)


def _shards_in(folder: str, limits: Limits) -> list[RemoteShard]:
    def ask(watch: Watch) -> dict[str, dict[str, Any]]:
        system, path = file_system(folder, limits)
        found = system.glob(path, detail=True) if "*" in path else system.find(path, maxdepth=2, detail=True)
        return {system.unstrip_protocol(name): info for name, info in found.items()}

    found = retry(folder, ask, limits)
    shards = {
        url for url in found if url.lower().endswith(SHARD_SUFFIXES) and not posixpath.basename(url).startswith(".")
    }
    shards = without_packed_twins(shards)
    if not shards:
        where = "match this pattern" if "*" in folder else "in this folder or one below"
        raise UserError(
            f"{without_query(folder)}: no tar shards {where}, or it cannot be listed; give a pattern such as "
            ".../{00000..00019}.tar"
        )
    if any(found[url].get("size") is None for url in shards):  # a web page of links tells names alone
        return described_shards(sorted(shards), limits)
    if "*" not in folder:
        inside = {url: _path(url).removeprefix(_path(folder)).lstrip("/") for url in found}
        names = (inside[url] for url in sorted(shards))
        refuse_several_parts(without_query(folder), names, built=BUILD_NOTES in inside.values())
    # A pattern of shards does not match the indexes beside them: there each has to be asked for.
    return [_shard(url, found[url], None if "*" in folder else url + INDEX_SUFFIX in found) for url in sorted(shards)]


def _path(url: str) -> str:
    return url.partition("://")[2].strip("/")  # memory://x is listed as memory:///x


def _host(url: str) -> str:
    return "/".join(without_query(url).split("/")[:3])
