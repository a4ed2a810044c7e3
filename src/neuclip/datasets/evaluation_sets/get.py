"""Evaluation sets into one root folder, each built beside its place and moved there when it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from neuclip import __version__
from neuclip.data.held_out import has_shards, open_task
from neuclip.data.tar.index import INDEX_SUFFIX
from neuclip.data.task_sets import CLASSNAMES, TEMPLATES, Puzzles, ZeroShotTask
from neuclip.datasets.evaluation_sets.checking import Checked, check_set
from neuclip.datasets.evaluation_sets.hub import HubCopy, NotOnTheHub, download, find_copy, sha256_of
from neuclip.datasets.evaluation_sets.layouts import (
    LeftOut,
    copy_layout,
    write_classification,
    write_puzzles,
    write_retrieval,
)
from neuclip.datasets.fetching import folder_size
from neuclip.errors import UserError
from neuclip.formatting import byte_size, plural
from neuclip.progress import track
from neuclip.records import write_json
from neuclip.tasks import Task

PROVENANCE = "SOURCE.json"
SPARE = 1.02  # of the bytes that are written: indexes lie beside shards

Agree = Callable[[list[tuple[Task, HubCopy]], int], None]  # copies, and the bytes that are still missing


@dataclass(frozen=True)
class Got:
    """A task that is below the root, or why it is not."""

    task: Task
    folder: Path | None  # None: it could not be got
    how: str  # there, copied, converted, downloaded; or the reason
    counts: dict[str, int]
    notes: tuple[str, ...]  # in what it differs from the task


def get_from_disk(tasks: Sequence[Task], place: Path, root: Path) -> list[Got]:
    """From a folder that holds the folders of tasks, or, of a single task, is one; or from a table of captions."""
    if not place.exists():
        raise UserError(f"{place}: no such file or folder; give what you downloaded with --from")
    places = {task.key: task.find_folder(place) if place.is_dir() else None for task in tasks}
    if len(tasks) == 1:
        places = {tasks[0].key: places[tasks[0].key] or place}
    got = []
    for task in tasks:
        found = places[task.key]
        if there := _there(task, root):
            got.append(there)
        elif found is None:
            got.append(Got(task, None, f"not in {place}, as none of {', '.join(task.folders)}", {}, ()))
        else:
            got.append(_bring(task, found, root))
    return got


def get_from_hub(tasks: Sequence[Task], root: Path, agree: Agree) -> list[Got]:
    """What is missing, from the hub. `agree` is shown what that is, and how many bytes, before anything is downloaded;
    it raises UserError if nobody wants them."""
    got = {task.key: found for task in tasks if (found := _there(task, root))}
    missing = [task for task in tasks if task.key not in got]
    copies: list[tuple[Task, HubCopy]] = []
    for task in track(missing, "asking the hub", len(missing), "tasks"):
        try:
            copies.append((task, find_copy(task)))
        except NotOnTheHub as nowhere:
            got[task.key] = Got(task, None, str(nowhere), {}, ())
    size = sum(max(0, copy.bytes - folder_size(_partial(task, root))) for task, copy in copies)
    if copies:
        refuse_no_room(root, size)
        agree(copies, size)
    for task, copy in copies:
        partial = _partial(task, root)
        download(task, copy, partial)
        origin = {"repository": copy.repository, "revision": copy.revision}
        got[task.key] = _finish(task, partial, root, "downloaded", origin, check_set(task, partial))
    return [got[task.key] for task in tasks]


def refuse_no_room(root: Path, size: int) -> None:
    free = shutil.disk_usage(_existing(root)).free
    if size * SPARE > free:
        raise UserError(
            f"{root}: {byte_size(size)} are needed and {byte_size(free)} are free; make room, or give --to a folder on "
            "another disk"
        )


def _existing(root: Path) -> Path:
    return next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())


def _there(task: Task, root: Path) -> Got | None:
    """A set that is below the root already. One that is broken is never replaced: it may be somebody's work."""
    folder = task.find_folder(root)
    if folder is None:
        return None
    try:
        checked = check_set(task, folder)
    except UserError as error:
        raise UserError(f"{error}; or remove {folder} to get it again") from error
    return Got(task, folder, "there", checked.counts, checked.notes)


def _bring(task: Task, place: Path, root: Path) -> Got:
    """Copied where it is in the layout, else converted. What an interrupted call left is made anew."""
    if root.absolute().is_relative_to(place.absolute()):
        raise UserError(f"{root}: lies inside of {place}, which is read; give --to a folder elsewhere")
    partial = _partial(task, root)
    shutil.rmtree(partial, ignore_errors=True)
    in_layout = task.kind != "puzzles" and has_shards(place)
    how, origin = "copied" if in_layout else "converted", {"folder": str(place.absolute())}
    if in_layout:
        checked = check_set(task, place)  # before it is copied: messages then name the file that is wrong
        if (existing := _existing(root)).stat().st_dev != place.stat().st_dev:  # on one disk links take no room
            refuse_no_room(existing, folder_size(place))
        copy_layout(place, partial)
        return _finish(task, partial, root, how, origin, checked)
    refuse_no_room(root, folder_size(place))
    notes = _convert(task, place, partial)
    checked = check_set(task, partial)
    return _finish(task, partial, root, how, origin, replace(checked, notes=(*checked.notes, *notes)))


def _convert(task: Task, place: Path, partial: Path) -> list[str]:
    """Returns what the user should know of the result."""
    opened = open_task(task, place)
    if isinstance(opened, Puzzles):
        write_puzzles(opened, partial)
        return []
    if not isinstance(opened, ZeroShotTask):
        return _left_out(write_retrieval(opened, partial))
    templates = place / TEMPLATES
    left_out = write_classification(opened, templates if templates.is_file() else None, partial)
    named = (place / CLASSNAMES).is_file()
    return _left_out(left_out) + ([] if named else [f"no {CLASSNAMES}: class names are those of the folders"])


def _left_out(images: LeftOut) -> list[str]:
    return [f"{plural(count, 'image')} left out: {reason}" for reason, count in images.items()]


def _partial(task: Task, root: Path) -> Path:
    return root / f".{task.folder}.partial"


def _finish(task: Task, partial: Path, root: Path, how: str, origin: dict[str, str], checked: Checked) -> Got:
    """Write where it comes from, and give it its name."""
    files = sorted(file for file in partial.rglob("*") if file.is_file() and not file.name.endswith(INDEX_SUFFIX))
    hashes = {
        file.relative_to(partial).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
        for file in track(files, f"hashing {task.folder}", len(files), "files")
    }
    about = {"task": task.key, "how": how, "from": origin, "neuclip": __version__}
    write_json(partial / PROVENANCE, about | {"counts": checked.counts, "notes": checked.notes, "files": hashes})
    folder = root / task.folder
    partial.rename(folder)
    return Got(task, folder, how, checked.counts, checked.notes)
