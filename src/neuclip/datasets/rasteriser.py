"""resvg, which draws SVG documents: whether it is installed, its version, and drawing that fails with ValueError only.

Imported late, because the rest of the package must work without the demo's extra.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

RASTERISER = "resvg-py"  # what pip calls it
RASTERISER_MODULE = "resvg_py"


def has_rasteriser() -> bool:
    return importlib.util.find_spec(RASTERISER_MODULE) is not None


def rasteriser_version() -> str:
    """Of the Python package; "none" without it, because sets are listed before they can be built."""
    try:
        return importlib.metadata.version(RASTERISER)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def svg_to_png(**document: Any) -> bytes:
    """A PNG file of a document, given as resvg_py.svg_to_bytes takes it; ValueError when it cannot be drawn.

    No fonts of the machine are used: an image must not depend on it.
    """
    import resvg_py

    try:
        return bytes(resvg_py.svg_to_bytes(**document, skip_system_fonts=True))
    except BaseException as problem:
        # A bug inside resvg (a Rust panic) comes as a class that is no Exception and cannot be imported.
        if type(problem).__name__ != "PanicException":
            raise
        raise ValueError(f"resvg cannot draw this document: {problem}") from problem
