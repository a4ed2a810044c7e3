from __future__ import annotations

from pathlib import Path

import pytest

from neuclip.models.towers import BuiltModel, build_model
from tests.builders.images import caption, image_bytes


@pytest.fixture(scope="session")
def built() -> BuiltModel:
    """A real model with random weights."""
    return build_model("tiny")


@pytest.fixture
def photos(tmp_path) -> Path:
    return draw_photos(tmp_path / "photos")


def draw_photos(folder: Path) -> Path:
    """A folder with 12 drawings, one of them below, and a file that is no image."""
    (folder / "below").mkdir(parents=True)
    for number in range(12):
        place = folder / "below" if number == 11 else folder
        (place / f"{number:02d} {caption(number)}.png").write_bytes(image_bytes(number))
    (folder / "notes.txt").write_text("not an image")
    return folder
