"""Evaluation sets written in their local layouts, from whatever a download on this disk holds. No image is decoded."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from neuclip.data.convert import Member, add_sample, open_new_tar
from neuclip.data.decoding import ending_by_content
from neuclip.data.locations import DATASET_TYPE, SHARD_COUNT
from neuclip.data.source import BadSample, Sample, Source
from neuclip.data.task_sets import CLASSNAMES, IMAGES, TEMPLATES, Puzzles, ZeroShotTask
from neuclip.progress import track

SHARD_SAMPLES, SHARD_BYTES = 10_000, 1_000_000_000  # at most, as CLIP_benchmark's exporter
LAYOUT_FILES = (CLASSNAMES, TEMPLATES, DATASET_TYPE)
PUZZLES = "puzzles.jsonl"

LeftOut = Counter[str]  # images that cannot be read, by reason


def copy_layout(place: Path, folder: Path) -> None:
    """A folder that is in the layout already: hard links where the disk allows, which take no room, else copies."""
    names = [name for name in LAYOUT_FILES if (place / name).is_file()]
    names += [f"test/{SHARD_COUNT}", *sorted(f"test/{path.name}" for path in (place / "test").glob("*.tar"))]
    (folder / "test").mkdir(parents=True)
    for name in track(names, f"copying {place.name}", len(names), "files"):
        link_or_copy(place / name, folder / name)


def write_classification(task: ZeroShotTask, templates: Path | None, folder: Path) -> LeftOut:
    """As CLIP_benchmark writes it. Default templates are not written: they are nobody's choice."""
    folder.mkdir(parents=True)
    (folder / CLASSNAMES).write_text("".join(f"{name}\n" for name in task.classnames), encoding="utf-8")
    if templates:
        shutil.copyfile(templates, folder / TEMPLATES)
    return _write_test(task.source, folder, lambda id, _: [("cls", str(task.labels[id]).encode())])


def write_retrieval(source: Source, folder: Path) -> LeftOut:
    """Captions become the lines of a `txt` member; a line break inside of one becomes a blank."""
    folder.mkdir(parents=True)
    (folder / DATASET_TYPE).write_text("retrieval\n")

    def text(_: int, sample: Sample) -> list[Member]:
        return [("txt", "\n".join(caption.replace("\n", " ") for caption in sample.captions).encode())]

    return _write_test(source, folder, text)


def _write_test(source: Source, folder: Path, beside: Callable[[int, Sample], list[Member]]) -> LeftOut:
    """test/0.tar, test/1.tar ... and their number. `beside`: what a sample has beside its image."""
    test, left_out = folder / "test", Counter[str]()
    test.mkdir()
    shards = samples = size = 0
    with contextlib.ExitStack() as stack:
        for id in track(range(len(source)), f"writing {folder.name.strip('.')}", len(source), "images"):
            if not shards or samples == SHARD_SAMPLES or size >= SHARD_BYTES:
                stack.close()
                tar = stack.enter_context(open_new_tar(test / f"{shards}.tar"))
                shards, samples, size = shards + 1, 0, 0
            try:
                sample = source[id]
            except BadSample as bad:
                left_out[bad.reason] += 1
                continue
            add_sample(tar, id, [(ending_by_content(sample.image) or "jpg", sample.image), *beside(id, sample)])
            samples, size = samples + 1, size + len(sample.image)
    (test / SHARD_COUNT).write_text(f"{shards}\n")
    return left_out


def write_puzzles(read: Puzzles, folder: Path) -> None:
    """A table of JSON lines, and the images that it needs, under their own names."""
    (folder / IMAGES).mkdir(parents=True)
    files = [Path(read.source.where(id)) for id in range(len(read.source))]
    for file in track(files, "copying images", len(files), "images"):
        link_or_copy(file, folder / IMAGES / file.name)
    lines = [
        {
            "cue": puzzle.cue,
            "candidates": [files[id].stem for id in puzzle.candidates],
            "associations": [files[id].stem for id in puzzle.associations],
        }
        for puzzle in read.puzzles
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (folder / PUZZLES).write_text(text, encoding="utf-8")


def link_or_copy(source: Path, target: Path) -> None:
    """Links of the hub's cache are followed: they lead to files that another program may remove."""
    with contextlib.suppress(OSError):
        os.link(source.resolve(), target)
        return
    shutil.copyfile(source, target)
