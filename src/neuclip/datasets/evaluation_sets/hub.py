"""Evaluation sets of the Hugging Face hub: what a copy holds, and its files, each verified by size and hash.

Which hub that is, and how it is reached, is huggingface_hub's own business (HF_ENDPOINT, HF_TOKEN).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from neuclip.data.locations import DATASET_TYPE
from neuclip.data.task_sets import CLASSNAMES, TEMPLATES
from neuclip.datasets.fetching import folder_size
from neuclip.errors import RunFailed
from neuclip.progress import SILENT_SECONDS, StatusLine, progress_text
from neuclip.tasks import Task

# The files of the layout and no others: of some copies the training part is larger than the test part.
WANTED = re.compile(rf"{re.escape(CLASSNAMES)}|{re.escape(TEMPLATES)}|{DATASET_TYPE}|test/(?:\d+\.tar|nshards\.txt)")
POLL_SECONDS = 0.5
HUB_FOLDER = ".cache"  # where huggingface_hub keeps what it needs to continue


class NotOnTheHub(RunFailed):
    """The hub answers, and has no copy of a task in the layout."""


@dataclass(frozen=True)
class HubFile:
    """A file with its hash: SHA-256 of large files (LFS), of the others git's SHA-1, which counts a header in."""

    name: str
    bytes: int
    sha256: str
    git_sha1: str

    def matches(self, path: Path) -> bool:
        if not path.is_file() or path.stat().st_size != self.bytes:
            return False
        if self.sha256:
            return sha256_of(path) == self.sha256
        header = f"blob {self.bytes}\0".encode()
        return hashlib.sha1(header + path.read_bytes(), usedforsecurity=False).hexdigest() == self.git_sha1


@dataclass(frozen=True)
class HubCopy:
    """One revision of a data set of the hub, as far as the layout needs it."""

    repository: str
    revision: str
    files: tuple[HubFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def find_copy(task: Task) -> HubCopy:
    """The first copy of the task that the hub has, else NotOnTheHub; only its list of files is downloaded."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    reason = "the hub has no copy in this layout"
    for repository in task.copies:
        try:
            with _hub_errors(task):
                info = HfApi().dataset_info(repository, files_metadata=True)
        except RunFailed as failure:
            if not isinstance(failure.__cause__, RepositoryNotFoundError):  # also of those one must ask for
                raise
            reason = f"{', '.join(task.copies)}: not on the hub, or not for everyone"
            continue
        siblings = [file for file in info.siblings or () if WANTED.fullmatch(file.rfilename)]
        files = [
            HubFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else "", file.blob_id or "")
            for file in siblings
        ]
        if any(file.name.endswith(".tar") for file in files):
            return HubCopy(repository, info.sha or "", tuple(files))
        reason = f"{repository}: has no test/0.tar"
    raise NotOnTheHub(f"{reason}; {by_hand(task)}")


def download(task: Task, copy: HubCopy, folder: Path) -> None:
    """Every file of a copy into the folder. If interrupted, the same call continues where it stopped."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    folder.mkdir(parents=True, exist_ok=True)
    disable_progress_bars()
    try:
        with _show_progress(f"downloading {task.name}", folder, copy.bytes):
            for file in copy.files:
                place = folder / file.name
                if file.matches(place):
                    continue
                place.unlink(missing_ok=True)
                with _hub_errors(task):
                    hf_hub_download(
                        copy.repository, file.name, repo_type="dataset", revision=copy.revision, local_dir=folder
                    )
                if not file.matches(place):
                    place.unlink(missing_ok=True)
                    raise RunFailed(
                        f"{copy.repository}: {file.name} has not the size and hash that the hub states, and was "
                        "deleted; run the command again"
                    )
    finally:
        enable_progress_bars()
    shutil.rmtree(folder / HUB_FOLDER, ignore_errors=True)


def by_hand(task: Task) -> str:
    """What to do without a network, or without a copy on the hub."""
    where = f"{task.copies[0]} (a data set of the Hugging Face hub)" if task.copies else "it"
    return f"fetch {where} elsewhere and give its folder with --from"


@contextlib.contextmanager
def _hub_errors(task: Task) -> Iterator[None]:
    """One line for whatever goes wrong on the way to the hub."""
    try:
        yield
    except Exception as error:  # of huggingface_hub, its HTTP library, or the system
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = (lines[0] if lines else type(error).__name__)[:200]
        raise RunFailed(
            f"{task.name}: the hub could not be read ({reason}); check the network and run the command again, or "
            f"{by_hand(task)}"
        ) from error


@contextlib.contextmanager
def _show_progress(what: str, folder: Path, total: int) -> Iterator[None]:
    """A thread looks at the folder's size; the download itself stays where Ctrl-C reaches it."""
    done = threading.Event()
    status = StatusLine(silent_seconds=SILENT_SECONDS)
    start = time.monotonic()
    before = folder_size(folder)

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            if status.due():
                megabytes = (folder_size(folder) - before) // 1_000_000
                status.show(
                    progress_text(what, megabytes, (total - before) // 1_000_000, time.monotonic() - start, "MB")
                )

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        status.close()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
