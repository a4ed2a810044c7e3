"""What the model is, remembered: to find it out takes open_clip, and importing that half of an examination's time."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from neuclip import __version__
from neuclip.data.machine import cache_folder
from neuclip.models import facts
from neuclip.models.facts import ModelFacts, model_facts
from neuclip.models.towers import SHIPPED
from neuclip.progress import waiting
from neuclip.records import write_json
from neuclip.settings.sections import ModelSettings

DECIDE = ("torch", "open_clip_torch", "timm", "transformers")  # packages on which the figures depend


def facts_of(asked: ModelSettings) -> ModelFacts:
    """As `model_facts`, and kept in the cache folder for the next time."""
    place = cache_folder() / "models" / f"{_digest(asked)}.json"
    try:
        stored = json.loads(place.read_bytes())
        return ModelFacts(**stored | {"image_size": tuple(stored["image_size"])})
    except (OSError, ValueError, TypeError, KeyError):  # not there, or not ours
        pass
    with waiting(f"building {asked.name} without its weights"):
        found = model_facts(
            asked.name, image_size=asked.image_size, gradient_checkpointing=asked.gradient_checkpointing
        )
    with contextlib.suppress(OSError):  # a cache that cannot be written: found out again next time
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, asdict(found))
    return found


def _digest(asked: ModelSettings) -> str:
    """Of all that decides about the figures; open_clip's own configurations come with its version."""
    parts = [__version__, asked.name, asked.image_size, asked.gradient_checkpointing]
    digest = hashlib.sha256(repr([*parts, *map(_installed, DECIDE)]).encode())
    saved = Path(asked.name.removeprefix("local-dir:")) / "open_clip_config.json"
    for file in (Path(facts.__file__), SHIPPED / f"{asked.name}.json", Path(asked.name), saved):
        with contextlib.suppress(OSError):  # most names are no file's
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
