"""Building a set from one package: list, draw, drop equal pictures, split, write shards and notes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from neuclip.data.named.build_notes import drawing_versions, ids_digest
from neuclip.data.named.clip_art.item import Item, Listing
from neuclip.data.named.clip_art.picture import Picture
from neuclip.data.named.clip_art.pieces import drawn_items
from neuclip.data.named.clip_art.readme import readme
from neuclip.data.named.clip_art.splitting import split_in_groups
from neuclip.data.named.fetching import Package, fetched, fetched_version
from neuclip.data.named.icons.rasteriser import require_rasteriser
from neuclip.data.named.icons.twins import first_of_each_picture, stack_thumbnails
from neuclip.data.shards.writing import Entry, write_shards
from neuclip.errors import RunFailed
from neuclip.progress import StatusLine, track
from neuclip.records import write_json, write_text_safely

PIECES = "pieces"
EQUAL = "equal to another picture"


class Pair(NamedTuple):
    item: Item
    picture: Picture


Lister = Callable[[Path], Listing]


def build(folder: Path, name: str, package: Package, list_items: Lister, parts: Sequence[str]) -> None:
    """Build a set into `folder`. With one part all pictures are in it; with two they are split by groups."""
    require_rasteriser(name)
    listing = list_items(fetched(package))
    if not listing.items:
        raise RunFailed(
            f"{package.name} {fetched_version(package)} holds no pictures of {name} where they are expected"
        )
    left_out = Counter(listing.left_out)
    pieces = folder / PIECES / fetched_version(package)
    items = without_equal_files(listing.items, left_out)
    pairs = without_equal_pictures(draw_pairs(items, pieces, left_out), left_out)
    split = split_pairs(pairs, parts)
    for part, chosen in split.items():
        shutil.rmtree(folder / part, ignore_errors=True)  # of a build that was killed
        write_part(folder / part, chosen, name)
    write_notes(folder, name, package, split, left_out)
    shutil.rmtree(folder / PIECES)


def draw_pairs(items: Sequence[Item], pieces: Path, left_out: Counter[str]) -> list[Pair]:
    pairs = []
    drawn = zip(items, drawn_items(items, pieces), strict=True)
    for item, picture in track(drawn, "drawing", len(items), "pictures"):
        if isinstance(picture, str):
            left_out[picture] += 1
        else:
            pairs.append(Pair(item, picture))
    return pairs


def without_equal_files(items: Sequence[Item], left_out: Counter[str]) -> list[Item]:
    """Links and copies go before anything is drawn; of equal files the one with the shortest caption stays."""
    digests = [hashlib.sha256(item.file.read_bytes()).digest() for item in items]
    kept = first_of_each_picture(digests, [item.caption for item in items])
    left_out[EQUAL] += len(items) - len(kept)
    return [items[position] for position in kept]


def without_equal_pictures(pairs: Sequence[Pair], left_out: Counter[str]) -> list[Pair]:
    """Of equal pictures the one with the shortest caption stays."""
    kept = first_of_each_picture([pair.picture.digest for pair in pairs], [pair.item.caption for pair in pairs])
    left_out[EQUAL] += len(pairs) - len(kept)
    return [pairs[position] for position in kept]


def split_pairs(pairs: Sequence[Pair], parts: Sequence[str]) -> dict[str, list[Pair]]:
    if len(parts) == 1:
        return {parts[0]: list(pairs)}
    status = StatusLine()
    status.show(f"looking for pictures that look alike among {len(pairs):,}")
    grey = stack_thumbnails([pair.picture.thumbnail for pair in pairs]).grey
    chosen = split_in_groups([pair.item.key for pair in pairs], [pair.item.series for pair in pairs], grey)
    status.close()
    split: dict[str, list[Pair]] = {part: [] for part in parts}
    for pair, part in zip(pairs, chosen, strict=True):
        split[part].append(pair)
    return split


def write_part(folder: Path, pairs: Sequence[Pair], name: str) -> None:
    """Shards in an order that looks random and is always the same: any first thousand is a fair mixture."""
    ordered = sorted(pairs, key=lambda pair: hashlib.sha256(pair.item.key.encode()).digest())
    write_shards(folder, _entries(ordered, name))


def _entries(pairs: Sequence[Pair], name: str) -> Iterator[Entry]:
    for index, (item, picture) in enumerate(pairs):
        about = {"source": name, **item.about, "index": index}
        described = json.dumps(about, ensure_ascii=False).encode()
        yield (picture.extension, picture.content), ("txt", item.caption.encode()), ("json", described)


def write_notes(
    folder: Path, name: str, package: Package, split: Mapping[str, Sequence[Pair]], left_out: Counter[str]
) -> None:
    """README.md for people, BUILD.json for those who want to know whether two builds are the same."""
    version = fetched_version(package)
    counts = {part: len(pairs) for part, pairs in split.items()}
    captions = {part: len({pair.item.caption for pair in pairs}) for part, pairs in split.items()}
    reasons = dict(sorted(left_out.items()))
    write_text_safely(folder / "README.md", readme(name, package.name, version, counts, captions, reasons))
    write_json(
        folder / "BUILD.json",
        {
            "packages": {package.name: version},
            "drawn_with": drawing_versions(),
            "pairs": counts,
            "different_captions": captions,
            "left_out": reasons,
            "ids_sha256": {part: ids_digest(pair.item.key for pair in pairs) for part, pairs in split.items()},
        },
    )
