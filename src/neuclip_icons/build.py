"""Builds icons-30k: draws all sources, drops equal images and near duplicates, and writes the data set."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from neuclip.data.convert import Entry, write_shards, write_tar
from neuclip.errors import RunFailed, install_command
from neuclip.files import lock, write_json
from neuclip.formatting import format_duration
from neuclip.progress import StatusLine, track
from neuclip_icons.drawing import draw_all
from neuclip_icons.names import Emoji, emoji_table
from neuclip_icons.sources import (
    PACKAGES,
    RASTERISER,
    SOURCES,
    Source,
    check_packages,
    installed_versions,
    list_drawings,
    missing_packages,
)
from neuclip_icons.split import (
    NEW_CONCEPTS,
    NEW_DRAWINGS,
    PARTS,
    TRAIN,
    Icon,
    has_heldout_word,
    near_duplicates,
    shuffle,
    split_by_concept,
    unique,
    widely_drawn,
)

EXPECTED_PAIRS = {TRAIN: 27424, NEW_DRAWINGS: 1144, NEW_CONCEPTS: 1542}  # with the tested package versions
TEMPLATES = ("{c}", "a picture of {c}.", "an icon of {c}.", "a drawing of {c}.", "a small image of {c}.")
FEWEST_IMAGES = 5  # subgroups with fewer test images are left out of their task
ATTRIBUTION = """# Where the images of icons-30k come from

Every image is a 64 x 64 rendering of a drawing from one of these packages; its JSON names source and licence.

{packages}
Names, groups and keywords of the emoji: Unicode CLDR (Unicode-3.0), by way of emojibase (MIT).

OpenMoji is share-alike: whoever publishes images made from it must name OpenMoji and keep them under CC-BY-SA-4.0.
Twemoji and Font Awesome (CC-BY-4.0) must be named, with a note that the drawings were rendered at a small size.
"""

Parts = Mapping[str, Sequence[Icon]]


def build_once(folder: Path) -> None:
    """Build the set, if the folder does not exist. One process at a time builds it in a temporary folder beside the
    final one and renames it, so that an incomplete set is never found under the final name."""
    if folder.exists():
        return
    check_packages()
    lock_file = folder.with_name(f".{folder.name}.lock")
    with lock(lock_file, wait=False) as alone:
        if alone is None:
            print("another process on this machine is building icons-30k; waiting for it", file=sys.stderr)
    with lock(lock_file):
        if not folder.exists():
            _build_beside(folder)


def _build_beside(folder: Path) -> None:
    print(f"building icons-30k into {folder}: once per machine, about a minute", file=sys.stderr)
    start = time.monotonic()
    # This process has the lock of this machine: other temporary folders with the machine's name are from killed builds.
    prefix = f".{folder.name}.{socket.gethostname()}"
    for leftover in folder.parent.glob(f"{prefix}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished = folder.with_name(f"{prefix}.{os.getpid()}")
    try:
        build(unfinished)
        unfinished.rename(folder)
    except OSError as error:
        if not folder.exists():  # otherwise another machine with the same disk has just built the same files
            reason = error.strerror or error
            raise RunFailed(f"{folder} could not be written ({reason}); free some space there and try again") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"built icons-30k in {format_duration(time.monotonic() - start)}", file=sys.stderr)


def build(folder: Path) -> None:
    """Build everything in `folder`, with progress on stderr. Takes a minute on two free cores and 0.2 GB of memory."""
    check_packages()
    status = StatusLine()
    if missing := missing_packages():
        status.say(f"warning: icons-30k is built without {', '.join(missing)}; install with: {install_command('demo')}")
    sources = [source for source in SOURCES if source.path]
    icons = draw_icons(sources)
    parts, names = split(unique(icons))
    for part, members in parts.items():
        write_part(folder / part, members, hide=part == TRAIN)
    write_tasks(folder / "zero-shot", parts, names)
    write_notes(folder, parts)
    counts = Counter(icon.source.name for icon in icons)
    counts += Counter({part: len(members) for part, members in parts.items()})
    warn_of_other_counts(counts, {source.name: source.expected for source in sources} | EXPECTED_PAIRS, status)


def draw_icons(sources: Sequence[Source]) -> list[Icon]:
    listed = [(source, one) for source in sources for one in list_drawings(source)]
    drawn = track(draw_all([one.art for _, one in listed]), "drawing", len(listed), "images")
    return [
        Icon(source, one.name, one.caption, image)
        for (source, one), image in zip(listed, drawn, strict=True)
        if image is not None
    ]


def split(icons: Sequence[Icon]) -> tuple[dict[str, list[Icon]], list[str]]:
    """The icons of each part, and the captions that at least three families draw (the classes of a zero-shot task)."""
    concepts = [icon.concept for icon in icons]
    parts: dict[str, list[Icon]] = {part: [] for part in PARTS}
    for icon, part in zip(icons, split_by_concept(concepts), strict=True):
        parts[part].append(icon)
    dropped = near_duplicates([*parts[NEW_DRAWINGS], *parts[NEW_CONCEPTS]], parts[TRAIN])
    kept = {part: [icon for icon in members if icon not in dropped] for part, members in parts.items()}
    return kept, sorted(widely_drawn(concepts))


def write_part(folder: Path, icons: Sequence[Icon], *, hide: bool) -> None:
    """Write shards with png, txt and json of each pair. `hide`: leave out keywords with a held-out word."""
    ordered = track(shuffle(icons), f"writing {folder.name}", len(icons), "pairs")
    write_shards(folder, (_entry(icon, facts(icon, hide) | {"index": index}) for index, icon in enumerate(ordered)))


def _entry(icon: Icon, about: dict[str, Any]) -> Entry:
    text = json.dumps(about, ensure_ascii=False)
    return [("png", icon.drawn.png), ("txt", icon.caption.encode()), ("json", text.encode())]


def facts(icon: Icon, hide: bool) -> dict[str, Any]:
    """The JSON of a sample."""
    emoji = emoji_of(icon)
    return {
        "source": icon.source.name,
        "family": icon.source.family,
        "hex" if emoji else "stem": icon.name,
        "tags": [tag for tag in emoji.tags if not (hide and has_heldout_word(tag))] if emoji else [],
        "group": emoji.group if emoji else None,
        "subgroup": emoji.subgroup if emoji else None,
        "license": icon.source.licence,
    }


def emoji_of(icon: Icon) -> Emoji | None:
    return emoji_table()[icon.name] if icon.source.is_emoji else None


def write_tasks(folder: Path, parts: Parts, names: Sequence[str]) -> None:
    """Write three zero-shot tasks: the Unicode group and subgroup of the test emoji, and the name of a new drawing
    among all names."""
    tested = [(icon.drawn.png, emoji_of(icon)) for icon in shuffle([*parts[NEW_DRAWINGS], *parts[NEW_CONCEPTS]])]
    groups = [(png, emoji.group.replace("-", " and ")) for png, emoji in tested if emoji]
    subgroups = [(png, emoji.subgroup.replace("-", " ")) for png, emoji in tested if emoji]
    counts = Counter(name for _, name in subgroups)
    drawings = [(icon.drawn.png, icon.caption) for icon in shuffle(parts[NEW_DRAWINGS])]
    write_task(folder / "groups", groups)
    write_task(folder / "subgroups", [(png, name) for png, name in subgroups if counts[name] >= FEWEST_IMAGES])
    write_task(folder / "names", drawings, names)


def write_task(folder: Path, images: Sequence[tuple[bytes, str]], names: Iterable[str] = ()) -> None:
    """Write images with their class names in the layout of CLIP_benchmark's webdataset classification sets. `names`:
    all classes; default: the classes of the images."""
    classes = sorted(names or {name for _, name in images})
    label = {name: number for number, name in enumerate(classes)}
    (folder / "test").mkdir(parents=True)
    (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
    (folder / "zeroshot_classification_templates.txt").write_text("".join(f"{line}\n" for line in TEMPLATES))
    (folder / "test" / "nshards.txt").write_text("1\n")
    entries = ((("png", png), ("cls", str(label[name]).encode())) for png, name in images)
    write_tar(folder / "test" / "0.tar", enumerate(entries))


def write_notes(folder: Path, parts: Parts) -> None:
    """Write ATTRIBUTION.md, which names the authors and licences of the drawings for people who share the images, and
    BUILD.json, which shows whether two builds are equal."""
    versions = installed_versions()
    lines = [
        f"- {PACKAGES[name].art}: {PACKAGES[name].licence}, {PACKAGES[name].home} (PyPI {name} {versions[name]})\n"
        for name in PACKAGES
        if name in versions
    ]
    (folder / "ATTRIBUTION.md").write_text(ATTRIBUTION.format(packages="".join(lines)), encoding="utf-8")
    drawing = {name: version(name) for name in (RASTERISER, "pillow", "numpy")}  # their code decides the pixels
    ids = {part: "\n".join(sorted(icon.id for icon in icons)) for part, icons in parts.items()}
    write_json(
        folder / "BUILD.json",
        {
            "packages": versions | drawing,
            "pairs": {part: len(icons) for part, icons in parts.items()},
            "ids_sha256": {part: hashlib.sha256(text.encode()).hexdigest() for part, text in ids.items()},
        },
    )


def warn_of_other_counts(counts: Mapping[str, int], expected: Mapping[str, int], status: StatusLine) -> None:
    """Warn if the counts differ from those of the tested package versions: results are then not comparable."""
    for name, number in expected.items():
        if counts[name] != number:
            status.say(
                f"warning: icons-30k: {name} has {counts[name]:,} images instead of {number:,}; the installed versions "
                "of its packages may differ from the tested ones"
            )
