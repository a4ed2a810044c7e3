"""The Open Clip Art Library as Debian packs it: drawings by some 500 people, with titles, tags and folders."""

from __future__ import annotations

import html
from pathlib import Path
from xml.etree import ElementTree

from neuclip.data.named.clip_art.item import Item, Listing, clean
from neuclip.data.named.clip_art.titles import (
    Metadata,
    caption_of,
    name_of,
    tag_frequency,
    useful_tags,
    without_addresses,
)
from neuclip.progress import track

FOLDER = "usr/share/openclipart/svg"
LICENCE = "public domain"
# Thousands of stars by number of points, jigsaw pieces by number, icons by the names of desktop programs; colour ramps
# that draw nothing.
LEFT_OUT = ("shapes/stars", "shapes/jigsaw", "computer/icons", "special/gradients")
PUBLIC_DOMAIN = ("http://web.resource.org/cc/PublicDomain", "http://creativecommons.org/licenses/publicdomain/", "")
DUBLIN = "{http://purl.org/dc/elements/1.1/}"
RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"
SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"


def list_items(package: Path) -> Listing:
    """One item per drawing that can be drawn whole, and whose files and tags say what it shows."""
    root = package / FOLDER
    listing = Listing()
    read: list[tuple[Path, str, Metadata, str]] = []
    files = sorted(root.rglob("*.svg"))
    for file in track(files, "reading titles and tags", len(files), "files"):
        key = file.relative_to(root).as_posix()
        if key.startswith(LEFT_OUT):
            listing.left_out["folder of shapes, icons or gradients"] += 1
        elif reason := _listed(file, key, read):
            listing.left_out[reason] += 1
    frequency = tag_frequency(useful_tags(metadata) for _, _, metadata, _ in read)
    for file, key, metadata, name in read:
        tags = useful_tags(metadata)
        caption = clean(caption_of(name, tags, frequency))
        if not caption:
            listing.left_out["no caption"] += 1
            continue
        about = {
            "file": key,
            "category": key.rpartition("/")[0],
            "name": name,
            "tags": tags,
            "author": without_addresses(metadata.author),
            "license": LICENCE,
        }
        listing.items.append(Item(key, file, caption, about, series=f"{name or caption}|{metadata.author}"))
    return listing


def _listed(file: Path, key: str, read: list[tuple[Path, str, Metadata, str]]) -> str:
    """Append what was read; otherwise the reason why the drawing is left out."""
    try:
        document = ElementTree.parse(file).getroot()
    except ElementTree.ParseError:
        return "not well-formed"
    metadata = read_metadata(document)
    if metadata.licence not in PUBLIC_DOMAIN:
        return "names another licence"
    if any("".join(text.itertext()).strip() for text in document.iter(f"{SVG}text")):
        return "needs a font"  # what its words look like would depend on the machine
    if any(not image.get(LINK, "").startswith("data:") for image in document.iter(f"{SVG}image")):
        return "shows a file that is not in the package"
    read.append((file, key, metadata, name_of(file.stem, metadata)))
    return ""


def read_metadata(document: ElementTree.Element) -> Metadata:
    """What an SVG document of the library says about itself."""
    licences = [element for element in document.iter() if str(element.tag).endswith("}license")]
    return Metadata(
        title=_text(document.find(f".//{DUBLIN}title")),
        author=_text(document.find(f".//{DUBLIN}creator//{DUBLIN}title")),
        tags=tuple(_text(element) for element in document.iter(f"{RDF}li")),
        licence=licences[0].get(f"{RDF}resource", "") if licences else "",
    )


def _text(element: ElementTree.Element | None) -> str:
    """Unescaped once more than XML asks for, because the library's own programs escaped twice."""
    return "" if element is None else clean(html.unescape(element.text or ""))
