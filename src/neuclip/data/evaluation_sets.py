"""Downloads DataComp's evaluation sets from the Hugging Face hub to one root folder, in the layout of neuclip eval.

A set that you already have need not be copied: put its folder, or a link to it, into the root folder under the task's
folder name. Class folders, Karpathy's captions with images and WinoGAViL's table with images are read as they are.
huggingface_hub decides which hub is used and how (HF_ENDPOINT, HF_TOKEN).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from neuclip.data.held_out import open_task
from neuclip.data.locations import DATASET_TYPE, SHARD_COUNT
from neuclip.data.source import fingerprint
from neuclip.data.task_sets import CLASSNAMES, TEMPLATES, Puzzles, ZeroShotTask
from neuclip.errors import RunFailed, UserError
from neuclip.files import existing_parent, write_json
from neuclip.formatting import byte_size
from neuclip.progress import track
from neuclip.tasks import Task

# Only the files of the layout: some copies have a training part that is larger than the test part.
WANTED = (CLASSNAMES, TEMPLATES, DATASET_TYPE, "test/*.tar", f"test/{SHARD_COUNT}")
PROVENANCE = "SOURCE.json"
SPARE = 1.02  # times the bytes of the download: space for the indexes beside the shards


@dataclass(frozen=True)
class SetStatus:
    """A task's set in the root folder, or the reason why it could not be obtained."""

    task: Task
    folder: Path | None  # None: it could not be obtained
    status: str  # "there", "downloaded", or the reason
    counts: dict[str, int]
    notes: tuple[str, ...] = ()  # how the set differs from the task's: results on it are not comparable


@dataclass(frozen=True)
class HubCopy:
    """One revision of a data set of the hub."""

    task: Task
    repository: str
    revision: str
    bytes: int  # still to be downloaded


class NotOnTheHub(RunFailed):
    """The hub can be reached, but has no copy of a task in the layout."""


def get_sets(tasks: Sequence[Task], root: Path, confirm: Callable[[list[HubCopy]], None]) -> list[SetStatus]:
    """Download the sets that are missing in the root folder, and check all of them. `confirm` receives the list of
    downloads before the first one, and raises UserError if the user declines. After an interruption, the same call
    continues.

    >>> get_sets(choose_tasks("dtd"), Path("sets"), print)[0].counts                                # doctest: +SKIP
    {'images': 1880, 'classes': 47}
    """
    got = {task.key: _check_there(task, folder) for task in tasks if (folder := task.find_folder(root))}
    missing = [task for task in tasks if task.key not in got]
    copies = []
    for task in track(missing, "asking the hub", len(missing), "tasks"):
        try:
            copies.append(find_copy(task, root))
        except NotOnTheHub as error:
            got[task.key] = SetStatus(task, None, str(error), {})
    if copies:
        refuse_no_room(root, sum(copy.bytes for copy in copies))
        confirm(copies)
    for copy in copies:
        got[copy.task.key] = download(copy, root)
    return [got[task.key] for task in tasks]


def _check_there(task: Task, folder: Path) -> SetStatus:
    """Check a set that is already in the root folder. A broken one is never replaced: it may be the user's own work."""
    try:
        return check_set(task, folder, "there")
    except UserError as error:
        raise UserError(f"{error}; or remove {folder} to download it again") from error


def find_copy(task: Task, root: Path) -> HubCopy:
    """The first of the task's copies that the hub has. Only its list of files is downloaded. Files that an interrupted
    call has already downloaded are not counted in its bytes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    reason = "the hub has no copy in this layout"
    for repository in task.copies:
        try:
            about = HfApi().dataset_info(repository, files_metadata=True)
        except RepositoryNotFoundError:  # also raised for repositories that need permission
            reason = f"{', '.join(task.copies)}: not on the hub, or not public"
            continue
        except Exception as error:
            raise _hub_failed(task, root, error) from error
        sizes = {
            file.rfilename: file.size or 0
            for file in about.siblings or ()
            if any(fnmatch(file.rfilename, pattern) for pattern in WANTED)
        }
        if any(name.endswith(".tar") for name in sizes):
            partial = partial_folder(task, root)
            missing = [size for name, size in sizes.items() if not (partial / name).is_file()]
            return HubCopy(task, repository, about.sha or "", sum(missing))
        reason = f"{repository}: has no test/0.tar"
    raise NotOnTheHub(f"{reason}; {by_hand(task, root)}")


def download(copy: HubCopy, root: Path) -> SetStatus:
    """Download a set to a partial folder, check it, and then rename the folder: a broken or incomplete set never has
    the task's folder name."""
    from huggingface_hub import snapshot_download

    task, partial, folder = copy.task, partial_folder(copy.task, root), root / copy.task.folder
    try:
        snapshot_download(
            copy.repository, repo_type="dataset", revision=copy.revision, allow_patterns=list(WANTED), local_dir=partial
        )
    except Exception as error:
        raise _hub_failed(task, root, error) from error
    try:
        got = check_set(task, partial, "downloaded")
    finally:
        # huggingface_hub notes here which files are complete. Without these notes, the next call compares every file's
        # hash and downloads broken files again.
        shutil.rmtree(partial / ".cache", ignore_errors=True)
    write_json(partial / PROVENANCE, {"task": task.key, "repository": copy.repository, "revision": copy.revision})
    partial.rename(folder)
    return SetStatus(task, folder, got.status, got.counts, got.notes)


def partial_folder(task: Task, root: Path) -> Path:
    return root / f".{task.folder}.partial"


def _hub_failed(task: Task, root: Path, error: Exception) -> RunFailed:
    """The one-line error for any failure of huggingface_hub, its HTTP library, or the system."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = (lines[0] if lines else type(error).__name__)[:200]
    return RunFailed(
        f"{task.name}: the hub could not be read ({reason}); check the network and run the command again, or "
        f"{by_hand(task, root)}"
    )


def by_hand(task: Task, root: Path) -> str:
    """What the user can do without a network, or without a copy on the hub."""
    what = f"{task.copies[0]} (a data set of the Hugging Face hub)" if task.copies else "the set"
    return f"get {what} on another machine and put it, or a link to it, at {root / task.folder}"


def refuse_no_room(root: Path, size: int) -> None:
    free = shutil.disk_usage(existing_parent(root)).free
    if size * SPARE > free:
        raise UserError(
            f"{root}: {byte_size(size)} are needed and {byte_size(free)} are free; free some space, or give a folder "
            "on another disk with --to"
        )


def check_set(task: Task, folder: Path, status: str) -> SetStatus:
    """Check a task's set. Raises UserError if something is missing or broken. Counts that differ from the task's are
    only noted: a part of a set, or another version, is useful if its results are not mistaken for the task's."""
    opened = open_task(task, folder)
    notes = []
    if isinstance(opened, ZeroShotTask):
        counts = {"images": len(opened.source), "classes": len(opened.classnames)}
        expected = {"images": task.size, "classes": task.classes or 0}
        if not (folder / TEMPLATES).is_file():
            notes.append(f"no {TEMPLATES}: prompts are the default ones, not the task's")
        columns = 0 if opened.metadata is None else opened.metadata.shape[1]
        if columns < len(task.metadata):
            notes.append(f"{columns} numbers per image in npy members, the task has {', '.join(task.metadata)}")
    elif isinstance(opened, Puzzles):
        counts = {"images": len(opened.source), "puzzles": len(opened.puzzles)}
        expected = {"puzzles": task.size}
    else:
        counts = {"images": len(opened), "captions": fingerprint(opened)[1].captions}
        expected = {"images": task.size}
    differing = {what: number for what, number in expected.items() if counts[what] != number}
    notes += [f"{counts[what]:,} {what}, the task has {number:,}" for what, number in differing.items()]
    return SetStatus(task, folder, status, counts, tuple(notes))
