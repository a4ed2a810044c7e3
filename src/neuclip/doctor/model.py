"""Facts about the model, cached: finding them needs open_clip, whose import takes half of an examination's time."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from neuclip import __version__
from neuclip.files import cache_folder
from neuclip.models import config, facts
from neuclip.models.facts import ModelFacts, model_facts
from neuclip.progress import waiting
from neuclip.records import write_json
from neuclip.settings.sections import ModelSettings

PACKAGES = ("torch", "open_clip_torch", "timm", "transformers")  # the facts depend on their versions


def cached_facts(model: ModelSettings) -> ModelFacts:
    """`model_facts`, kept in the cache folder for the next time."""
    place = cache_folder() / "models" / f"{_digest(model)}.json"
    try:
        stored = json.loads(place.read_bytes())
        return ModelFacts(**stored | {"image_size": tuple(stored["image_size"])})
    except (OSError, ValueError, TypeError, KeyError):  # missing or broken
        pass
    with waiting(f"building {model.name} without its weights"):
        fresh = model_facts(model.name, model)
    with contextlib.suppress(OSError):  # without a writable cache they are computed again next time
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, asdict(fresh))
    return fresh


def _digest(model: ModelSettings) -> str:
    """Of everything the facts depend on; open_clip's own configurations are covered by its version."""
    folder = Path(model.name.removeprefix(config.LOCAL))
    weights = [file.name for file in folder.glob("*.*")]  # without them it is refused
    parts = [__version__, replace(model, pretrained=""), weights]
    digest = hashlib.sha256(repr([*parts, *map(_installed, PACKAGES)]).encode())
    ours = (Path(facts.__file__), Path(config.__file__), config.SHIPPED / f"{model.name}.json")
    for file in (*ours, Path(model.name), folder / "open_clip_config.json"):
        with contextlib.suppress(OSError):  # most of these files do not exist
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
