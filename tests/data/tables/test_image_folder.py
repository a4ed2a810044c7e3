"""Where the images of a table lie, which `neuclip search` is then told."""

from __future__ import annotations

import base64

import pytest

from neuclip.data.open import open_source
from tests.builders.images import image_bytes


@pytest.mark.parametrize(
    ("places", "found"), [(("photos/a", "photos/a"), "photos/a"), (("photos/a", "photos/b"), "photos"), (("", ""), "")]
)
def test_it_is_the_innermost_folder_that_has_all_images(places, found, tmp_path):
    rows = ["image,caption"]
    for number, place in enumerate(places):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / f"{number}.png").write_bytes(image_bytes(number))
        rows.append(f"{tmp_path / place if number else place or '.'}/{number}.png,a shape")
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    assert open_source(str(tmp_path / "pairs.csv")).image_folder() == tmp_path / found


def test_there_is_none_where_the_table_holds_the_images(tmp_path):
    images = [base64.b64encode(image_bytes(number)).decode() for number in range(2)]
    (tmp_path / "pairs.csv").write_text("\n".join(["image,caption", *(f"{image},a shape" for image in images)]))
    assert open_source(str(tmp_path / "pairs.csv")).image_folder() is None
