"""Small stand-ins for the packages that icons-30k is drawn from: the same layout, a few drawings each."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

from neuclip_icons.sources import PACKAGES, SOURCES, Source

# Drawn by three families or more; by the rule of the names, half of them are held out in one family.
SHARED = ("anchor", "key", "star", "bell", "rocket", "umbrella", "crown", "balloon")
# The keywords of `mouth` hold a held-out word, lipstick.
EMOJI = {"anchor": "2693", "key": "1F511", "star": "2B50", "bell": "1F514", "rocket": "1F680", "mouth": "1F444"}
DRAWN = ("openmoji", "mdi", "lucide", "tabler-outline")


def write_packages(folder: Path, *, drawn: tuple[str, ...] = DRAWN) -> Path:
    """To be put on the path before the real ones. Sources that are not drawn are not installed."""
    for name, package in PACKAGES.items():
        (folder / package.module).mkdir(parents=True)
        (folder / package.module / "__init__.py").touch()
        about = folder / f"{package.module}-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    for source in SOURCES:
        if source.name in drawn:
            place = folder / PACKAGES[source.package].module / source.where
            _write_emoji(place) if source.is_emoji else _write_icons(source, place)
    return folder


def _write_emoji(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, key in EMOJI.items():
        (folder / f"{key}.svg").write_text(svg(f"emoji {name}"))
    (folder / "1F408.svg").write_text(svg("emoji cat"))
    for spelling in ("1F525", "1F525-FE0F"):  # the same emoji, as vendors write its code points
        (folder / f"{spelling}.svg").write_text(svg(f"emoji fire {spelling}"))
    (folder / "license.svg").write_text(svg("no emoji"))


def _write_icons(source: Source, archive: Path) -> None:
    names = {name: svg(f"{source.name} {name}") for name in SHARED}
    names["sleeping-cat"] = svg(f"{source.name} cat")  # cat is a held-out word
    if source.name == "mdi":
        names |= {"lone-worker": svg("worker"), "worker": svg("worker"), "nothing": svg("", count=0), "broken": "<svg"}
        names["purr"] = svg("purr")
    if source.name == "lucide":
        names["cat-purr"] = svg("purr", shift=0.1)  # nearly what is trained on under another name
    if source.name.startswith("tabler"):
        names["brand-x"] = svg("a brand")
    with zipfile.ZipFile(archive, "w") as file:
        for name, text in names.items():
            file.writestr(f"{source.inside}/{name}.svg".lstrip("/"), text)


def svg(seed: str, *, count: int = 12, shift: float = 0.0) -> str:
    """Coloured squares, other ones for each seed."""
    draw = random.Random(seed)
    squares = [
        f'<rect x="{draw.uniform(0, 18) + shift}" y="{draw.uniform(0, 18)}" width="{draw.uniform(2, 8)}" height="6" '
        f'fill="rgb({draw.randrange(200)},{draw.randrange(200)},{draw.randrange(200)})"/>'
        for _ in range(count)
    ]
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24">{"".join(squares)}</svg>'
