"""Whole shards of remote data on the local disk: fetched when needed or just before, the longest unused go."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from neuclip.data.tar.gzip import is_packed, remove_unfinished, unpack
from neuclip.data.tar.remote import Limits, RemoteShard, fetch, without_query
from neuclip.errors import RunFailed, UserError
from neuclip.progress import SILENT_SECONDS, StatusLine

try:
    import fcntl
except ImportError:  # Windows: two processes may fetch the same shard, and the last to finish is used
    fcntl = None  # type: ignore[assignment]

LOCKS = 64  # lock files; shards that share one wait for each other, which only costs time
# What signs an address, besides x-amz-... and x-goog-...: the older ways of both, CloudFront's, tokens.
SIGNATURE = {
    "signature",
    "expires",
    "awsaccesskeyid",
    "googleaccessid",
    "key-pair-id",
    "policy",
    "token",
    "access_token",
}
# Azure's names are so short that they count only beside its "sig".
AZURE_SIGNATURE = {"sig", "se", "st", "sp", "sv", "sr", "ss", "srt", "spr", "sip"}
LEFT_OVER_SECONDS = 3600.0  # an unfinished file to which nothing was written for so long belongs to a killed process


class ShardCache:
    """The cache of one source; all caches of a machine share one folder and do each download once.

    A shard that is evicted while a process reads it stays readable there: the file is removed, not its bytes.

    >>> cache = ShardCache(Limits(cache_size=64_000_000_000))
    >>> cache.path(shard)        # fetched if need be
    >>> cache.want(next_shards)  # fetched in the background
    """

    def __init__(self, limits: Limits):
        from neuclip.data.machine import cache_folder

        self.folder = cache_folder() / "shards"
        self.limits = limits
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._wanted: list[RemoteShard] = []
        self._fetching = False
        self._unexpected: Exception | None = None  # a mistake of ours in the background, for the next reader

    def place(self, shard: RemoteShard) -> Path:
        """Where it lies once it is here. Another version of it has another place."""
        name = shard.name.removesuffix(".gz").removesuffix(".tgz").removesuffix(".tar")
        return self.folder / f"{digest_of(shard)}-{name}.tar"

    def path(self, shard: RemoteShard) -> Path:
        """The shard as a plain tar on this disk. Raises RunFailed with its URL when it cannot be had."""
        unexpected, self._unexpected = self._unexpected, None
        if unexpected is not None:
            raise unexpected
        place = self.place(shard)
        if not self._touch(place):
            with self._only_one(place):
                if not self._touch(place):
                    self._fetch(shard, place, _Waiting(shard))
        return place

    def open(self, shard: RemoteShard) -> int:
        """A descriptor to read from; another process may have evicted the shard since it was found."""
        for _ in range(100):
            with contextlib.suppress(FileNotFoundError):
                return os.open(self.path(shard), os.O_RDONLY)
        raise RunFailed(
            f"{without_query(shard.url)}: is removed from {self.folder} as soon as it is there; give more than "
            f"--data.cache_size {self.limits.cache_size}, to every run on this machine"
        )

    def use(self, shards: Sequence[RemoteShard]) -> list[RemoteShard]:
        """Those that are here count as used now; the others are the answer."""
        return [shard for shard in shards if not self._touch(self.place(shard))]

    def want(self, shards: Sequence[RemoteShard]) -> None:
        """Fetch these in the background, in this order; what was wanted before and is not begun is forgotten."""
        if self._process != os.getpid():  # a fork copies neither the thread nor who holds the lock
            self._start_afresh()
        missing = self.use(shards)
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
            place = self.place(shard)
            try:
                with self._only_one(place, wait=False) as alone:
                    if alone and not place.exists():
                        self._fetch(shard, place)
            except (RunFailed, UserError, OSError):
                pass  # whoever needs the shard tries again and tells why it cannot be had
            except Exception as error:
                self._unexpected = error

    def _fetch(self, shard: RemoteShard, place: Path, waiting: _Waiting | None = None) -> None:
        """Beside its place, then moved there in one step: a shard is whole or not there."""
        unfinished = None
        try:
            unfinished = fetch(shard.url, place, shard.size, self.limits, waiting.show if waiting else None)
            if is_packed(shard):
                unpack(unfinished, place)
            else:
                unfinished.chmod(0o644)  # mkstemp's 0600 would hide it from others who share the cache
                unfinished.replace(place)
        except OSError as error:  # which readers would take for a bad sample
            raise RunFailed(
                f"{without_query(shard.url)}: cannot be {'unpacked' if is_packed(shard) else 'kept'} "
                f"({error.strerror or error}); check the file there and the disk of {self.folder}"
            ) from error
        finally:
            if unfinished is not None:
                unfinished.unlink(missing_ok=True)
            if waiting is not None:
                waiting.close()
        self._evict(place)

    def _evict(self, newest: Path) -> None:
        with self._locked(self.folder / "locks" / "evict"):
            remove_unfinished(self.folder.glob(".*"), LEFT_OVER_SECONDS)
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

    def _touch(self, place: Path) -> bool:
        """Whether it is there; it then counts as used now."""
        try:
            os.utime(place)
        except FileNotFoundError:
            return False
        except OSError:  # another user's cache, which may be read all the same
            return place.exists()
        return True

    @contextlib.contextmanager
    def _only_one(self, place: Path, wait: bool = True) -> Iterator[bool]:
        """Let the other processes of this machine wait, so that eight ranks do not fetch a shard eight times."""
        number = int(hashlib.sha256(place.name.encode()).hexdigest(), 16) % LOCKS
        with self._locked(self.folder / "locks" / f"{number:02d}", wait) as alone:
            yield alone

    @contextlib.contextmanager
    def _locked(self, file: Path, wait: bool = True) -> Iterator[bool]:
        """Only saves work: it dies with its process, and moving files into place is safe without it."""
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
        self._start_afresh()


class _Waiting:
    """Tells what the training waits for, when it takes long. Of several processes the first speaks."""

    def __init__(self, shard: RemoteShard):
        self.shard = shard
        self.status = StatusLine(silent_seconds=SILENT_SECONDS) if _speaks() else None

    def show(self, bytes_: int) -> None:
        if self.status is not None and self.status.due():
            of = f" of {self.shard.size / 1e6:,.0f}" if self.shard.size >= 0 else ""
            self.status.show(f"fetching {self.shard.name}  {bytes_ / 1e6:,.0f}{of} MB")

    def close(self) -> None:
        if self.status is not None:
            self.status.close()


def _speaks() -> bool:
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    main_thread = threading.current_thread() is threading.main_thread()
    return main_thread and os.environ.get("RANK", "0") == "0" and (worker is None or worker.id == 0)


def digest_of(shard: RemoteShard) -> str:
    """Names one version of one file. A signature that is renewed does not change it, if the remote tells a version."""
    url = without_signature(shard.url) if shard.version else shard.url
    return hashlib.sha256(f"{url}\n{shard.size}\n{shard.version}".encode()).hexdigest()[:16]


def without_signature(url: str) -> str:
    """Without what a signed address proves by; the rest of the query stays, for it may say which file is meant."""
    address, _, query = url.partition("?")
    fields = [(field.partition("=")[0].lower(), field) for field in query.split("&") if field]
    names = {name for name, _ in fields}
    signing = SIGNATURE | (AZURE_SIGNATURE if "sig" in names else set())
    kept = [field for name, field in fields if name not in signing and not name.startswith(("x-amz-", "x-goog-"))]
    return f"{address}?{'&'.join(kept)}" if kept else address
