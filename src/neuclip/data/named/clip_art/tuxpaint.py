"""The stamps of Tux Paint: photographic cut-outs and drawings, each with a sentence in up to 78 languages."""

from __future__ import annotations

import re
from pathlib import Path

from neuclip.data.named.clip_art.item import Item, Listing, clean

FOLDER = "usr/share/tuxpaint/stamps"
LICENCE = "GPL-2.0-or-later"
TRANSLATION = re.compile(r"([\w@]+)\.utf8=(.*)")
PICTURES = (".png", ".svg")  # of two pictures of a stamp the PNG: it is what its author saw


def list_items(package: Path) -> Listing:
    """One item per `.txt`. Pictures without one are the mirrored halves of others (`dumper_mirror.png`)."""
    root = package / FOLDER
    listing = Listing()
    described = sorted(root.rglob("*.txt"))
    for text in described:
        file = next((text.with_suffix(ending) for ending in PICTURES if text.with_suffix(ending).is_file()), None)
        captions = read_captions(text.read_text(encoding="utf-8", errors="replace"))
        if file is None:
            listing.left_out["text without a picture"] += 1
        elif not captions["caption"]:
            listing.left_out["no caption"] += 1
        else:
            key = file.relative_to(root).as_posix()
            about = {"file": key, "category": key.rpartition("/")[0], "license": LICENCE, **captions}
            listing.items.append(Item(key, file, captions["caption"], about))
    known = {text.with_suffix("") for text in described}
    pictures = [path for ending in PICTURES for path in root.rglob(f"*{ending}")]
    listing.left_out["mirrored or other picture without a text"] = sum(
        path.with_suffix("") not in known for path in pictures
    )
    return listing


def read_captions(text: str) -> dict[str, str]:
    """The English sentence as `caption`, the others as `caption_de` and so on, sorted by language.

    >>> read_captions("A toucan.\\nfr.utf8=Un toucan.\\nde.utf8=Ein Tukan.\\n")
    {'caption': 'A toucan.', 'caption_de': 'Ein Tukan.', 'caption_fr': 'Un toucan.'}
    """
    english, *others = text.splitlines() or [""]
    found = [line for line in map(TRANSLATION.fullmatch, others) if line]
    translations = {f"caption_{line[1]}": clean(line[2]) for line in sorted(found, key=lambda line: line[1])}
    return {"caption": clean(english)} | {key: sentence for key, sentence in translations.items() if sentence}
