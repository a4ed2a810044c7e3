"""resvg, which draws SVG documents: whether it is there, its version, and drawing that fails with a ValueError only.

Imported late, because the rest of the package must work without the demo's extra.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

from neuclip.errors import UserError

RASTERISER = "resvg-py"  # what pip calls it
RASTERISER_MODULE = "resvg_py"


def has_rasteriser() -> bool:
    return importlib.util.find_spec(RASTERISER_MODULE) is not None


def require_rasteriser(name: str) -> None:
    """`name`: the data set that is to be drawn."""
    if not has_rasteriser():
        raise UserError(f"{name} is drawn with {RASTERISER}, which is not installed: pip install 'neuclip[demo]'")


def rasteriser_and_version() -> str:
    """For the version of a set; without the rasteriser too, because sets are listed before they can be built.

    >>> rasteriser_and_version()
    'resvg-py 0.3.2'
    """
    try:
        version = importlib.metadata.version(RASTERISER)
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    return f"{RASTERISER} {version}"


def svg_to_png(**document: Any) -> bytes:
    """A PNG file of a document, given as resvg_py.svg_to_bytes takes it; ValueError when it cannot be drawn.

    No fonts of the machine are used: an image must not depend on it.
    """
    import resvg_py

    try:
        return bytes(resvg_py.svg_to_bytes(**document, skip_system_fonts=True))
    except BaseException as problem:
        # A slip inside resvg (a Rust panic) comes as a class that is no Exception and cannot be imported.
        if type(problem).__name__ != "PanicException":
            raise
        raise ValueError(f"resvg cannot draw this document: {problem}") from problem
