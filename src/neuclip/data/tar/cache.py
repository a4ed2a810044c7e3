"""Whole shards of remote data on the local disk: fetched when needed or just before; the longest unused are evicted."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from neuclip.data.machine import cache_folder
from neuclip.data.source import ShardFacts, Source
from neuclip.data.tar.files import UNFINISHED, mark_used, move, remove_unused
from neuclip.data.tar.gzip import is_packed, plain_name, unpack
from neuclip.data.tar.remote import Limits, RemoteShard, fetch
from neuclip.errors import RunFailed, UserError
from neuclip.progress import SILENT_SECONDS, StatusLine
from neuclip.secrets import without_query

try:
    import fcntl
except ImportError:  # Windows: two processes may fetch the same shard, and the last to finish is used
    fcntl = None  # type: ignore[assignment]

LOCKS = 64  # lock files; shards that share one wait for each other, which only costs time
# Fields that sign an address, besides x-amz-... and x-goog-...: the older ones of both, CloudFront's, tokens.
SIGNATURE = {"signature", "expires", "awsaccesskeyid", "googleaccessid", "key-pair-id", "policy"}
SIGNATURE |= {"token", "access_token"}
# Azure's names are short: they count only beside its "sig".
AZURE_SIGNATURE = {"sig", "se", "st", "sp", "sv", "sr", "ss", "srt", "spr", "sip"}
KILLED_SECONDS = 3600  # a download that was not written to for this long belongs to a killed process


class ShardCache:
    """The cache of one source; all caches of a machine share one folder and do each download once.

    A shard that is evicted while a process reads it stays readable there: the file is removed, not its bytes.

    >>> cache = ShardCache(Limits(cache_size=64_000_000_000))
    >>> cache.path(shard)        # fetched if need be
    >>> cache.want(next_shards)  # fetched in the background
    """

    def __init__(self, limits: Limits):
        self.folder = cache_folder() / "shards"
        self.limits = limits
        self._start_in_process()

    def _start_in_process(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._wanted: list[RemoteShard] = []
        self._fetching = False
        self._bug: Exception | None = None  # of ours, in the background, for the next reader

    def place(self, shard: RemoteShard) -> Path:
        """Where it lies once it is here. Another version of it has another place."""
        name = plain_name(shard.name).removesuffix(".tar")
        return self.folder / f"{digest_of(shard)}-{name}.tar"

    def path(self, shard: RemoteShard) -> Path:
        """The shard as a plain tar on this disk. Raises RunFailed with its URL when it cannot be fetched."""
        bug, self._bug = self._bug, None
        if bug is not None:
            raise bug
        place = self.place(shard)
        if not mark_used(place):
            with self._lock_of(place):
                if not mark_used(place):
                    with _show_download(shard) as show:
                        self._fetch(shard, show)
        return place

    def open(self, shard: RemoteShard) -> int:
        """A descriptor to read from. Another process may evict the shard just after it was found."""
        for _ in range(100):
            with contextlib.suppress(FileNotFoundError):
                return os.open(self.path(shard), os.O_RDONLY)
        raise RunFailed(
            f"{without_query(shard.url)}: is removed from {self.folder} as soon as it is there; give more than "
            f"--data.cache_size {self.limits.cache_size}, to every run on this machine"
        )

    def mark_used(self, shards: Sequence[RemoteShard]) -> list[RemoteShard]:
        """Those that are on this disk count as used now. Returns the others."""
        return [shard for shard in shards if not mark_used(self.place(shard))]

    def want(self, shards: Sequence[RemoteShard]) -> None:
        """Fetch these in the background, in this order. What was wanted before and is not begun is dropped."""
        if self._process != os.getpid():  # a fork copies neither the thread nor who holds the lock
            self._start_in_process()
        missing = self.mark_used(shards)
        with self._lock:
            self._wanted = missing
            if missing and not self._fetching:
                self._fetching = True
                threading.Thread(target=self._fetch_wanted, name="fetch shards", daemon=True).start()

    def _fetch_wanted(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._fetching = False
                    return
                shard = self._wanted.pop(0)
            try:
                with self._lock_of(self.place(shard), wait=False) as alone:
                    if alone and not self.place(shard).exists():
                        self._fetch(shard)
            except (RunFailed, UserError, OSError):
                pass  # whoever needs the shard tries again and says why it cannot be fetched
            except Exception as error:
                self._bug = error

    def _fetch(self, shard: RemoteShard, show: Callable[[int], None] | None = None) -> None:
        """In one move: a shard is whole or not there."""
        place, unfinished = self.place(shard), None
        try:
            unfinished = fetch(shard.url, place, shard.size, self.limits, show)
            if is_packed(shard.name):
                unpack(unfinished, place, self.limits.cache_size)
            else:
                move(unfinished, place)
        except OSError as error:  # which readers would take for a bad sample
            raise RunFailed(
                f"{without_query(shard.url)}: cannot be {'unpacked' if is_packed(shard.name) else 'kept'} "
                f"({error.strerror or error}); check the file there and the disk of {self.folder}"
            ) from error
        finally:
            if unfinished is not None:
                unfinished.unlink(missing_ok=True)
        self._evict(place)

    def _evict(self, newest: Path) -> None:
        with self._lock_file("evict"):
            remove_unused(self.folder.glob(f".*{UNFINISHED}"), KILLED_SECONDS)
            files = []
            for path in self.folder.glob("[!.]*.tar"):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
            total = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total <= self.limits.cache_size:
                    break
                if path != newest:
                    path.unlink(missing_ok=True)
                    total -= size

    def _lock_of(self, place: Path, wait: bool = True) -> contextlib.AbstractContextManager[bool]:
        """The other processes of this machine wait: eight ranks must not fetch a shard eight times."""
        number = int(hashlib.sha256(place.name.encode()).hexdigest(), 16) % LOCKS
        return self._lock_file(f"{number:02d}", wait)

    @contextlib.contextmanager
    def _lock_file(self, name: str, wait: bool = True) -> Iterator[bool]:
        """Only saves work: it dies with its process, and moving files into place is safe without it."""
        file = self.folder / "locks" / name
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            stream = file.open("w")
        except OSError as error:
            raise RunFailed(
                f"{file.parent}: cannot be written ({error.strerror}); point NEUCLIP_CACHE to a folder that can"
            ) from error
        with stream:
            alone = True
            if fcntl is not None:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    alone = False
                except OSError:  # some network disks have no locks
                    pass
            yield alone

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "limits": self.limits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_in_process()


@contextlib.contextmanager
def _show_download(shard: RemoteShard) -> Iterator[Callable[[int], None] | None]:
    """A function to call with the bytes so far: it says what training waits for, when that takes long. None in all
    processes but the first, and in threads."""
    if not _is_first_process():
        yield None
        return
    size = f" of {shard.size / 1e6:,.0f}" if shard.size >= 0 else ""
    with contextlib.closing(StatusLine(silent_seconds=SILENT_SECONDS)) as status:

        def show(bytes_: int) -> None:
            if status.due():
                status.show(f"fetching {shard.name}  {bytes_ / 1e6:,.0f}{size} MB")

        yield show


def _is_first_process() -> bool:
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    main_thread = threading.current_thread() is threading.main_thread()
    return main_thread and os.environ.get("RANK", "0") == "0" and (worker is None or worker.id == 0)


def digest_of(shard: RemoteShard) -> str:
    """Names one version of one file. A renewed signature does not change it, if the remote tells a version."""
    url = _without_signature(shard.url) if shard.version else shard.url
    return hashlib.sha256(f"{url}\n{shard.size}\n{shard.version}".encode()).hexdigest()[:16]


def _without_signature(url: str) -> str:
    """The rest of the query stays: it may say which file is meant."""
    address, _, query = url.partition("?")
    fields = [(field.partition("=")[0].lower(), field) for field in query.split("&") if field]
    names = {name for name, _ in fields}
    signing = SIGNATURE | (AZURE_SIGNATURE if "sig" in names else set())
    kept = [field for name, field in fields if name not in signing and not name.startswith(("x-amz-", "x-goog-"))]
    return f"{address}?{'&'.join(kept)}" if kept else address


def check_cache_size(sources: Sequence[Source], together: int) -> None:
    """Raises UserError unless two groups of each remote source fit into the cache, the one that is read and the next:
    shards would be fetched over and over."""
    remote = [(source.name, facts) for source in sources if (facts := source.shard_facts()) and facts.disk_bytes]
    needed = [size for _, facts in remote for size in largest_shards(facts, together)]
    if remote and sum(needed) > (allowed := remote[0][1].cache_size):
        raise UserError(
            f"data.cache_size {allowed:,} is too small: {len(needed)} shards of "
            f"{' and '.join(name for name, _ in remote)} must be on the disk at a time; "
            f"give --data.cache_size {sum(needed)} or more"
        )


def largest_shards(facts: ShardFacts, together: int) -> list[int]:
    """The bytes of as many shards as must be on the disk at a time, of the largest."""
    return sorted(facts.disk_bytes, reverse=True)[: 2 * together]
