from __future__ import annotations

import json

import numpy as np
import pytest

from neuclip.data.named.builtin import builtin_folder, held_out
from neuclip.data.named.clip_art.splitting import TEST, split_in_groups
from neuclip.data.source import open_source

FOLDER = "usr/share/openclipart/svg"


@pytest.fixture
def put_drawings(put_package):
    def put(drawings: dict[str, bytes]) -> None:
        put_package("openclipart-svg", {f"{FOLDER}/{name}.svg": content for name, content in drawings.items()})

    return put


def test_drawings_that_cannot_be_drawn_whole_or_are_not_free_are_left_out_and_counted(put_drawings, drawing):
    picture = '<image xlink:href="C:\\mine.png" width="9" height="9"/>'
    put_drawings(
        {
            "food/pear_01": drawing("Pear", tags=("fruit",)),
            "food/copy_of_pear_01": drawing("Pear", tags=("fruit",)),
            "food/fc07": drawing("A Pack", x=10),
            "food/sign": drawing("Sign", body="<text>STOP</text>"),
            "food/empty": drawing("Empty words", x=20, body="<text> </text>"),
            "food/phone": drawing("Phone", body=picture),
            "food/gnu": drawing("Gnu", licence="http://creativecommons.org/licenses/GPL/2.0/"),
            "food/ghost": drawing("Ghost", colour="white"),
            "shapes/stars/star_1": drawing("Star"),
            "food/broken": b"<svg",
        }
    )
    folder = builtin_folder("openclipart")
    assert json.loads((folder / "BUILD.json").read_text())["left_out"] == {
        "equal to another picture": 1,
        "folder of shapes, icons or gradients": 1,
        "names another licence": 1,
        "needs a font": 1,
        "no caption": 1,
        "not well-formed": 1,
        "nothing to see on white": 1,
        "shows a file that is not in the package": 1,
    }


def test_its_parts_are_training_and_a_test_that_training_on_it_finds(put_drawings, drawing):
    names = [chr(97 + number) * 4 for number in range(20)]
    circles = [f'<circle cx="{17 * number % 100}" cy="{31 * number % 100}" r="30"/>' for number in range(20)]
    put_drawings({f"food/{name}_01": drawing(name, body=circle) for name, circle in zip(names, circles, strict=True)})
    builtin_folder("openclipart")
    train, test = open_source("openclipart").captions(), open_source("openclipart/test").captions()
    assert sorted(train + test) == names and test
    assert held_out("openclipart").retrieval == ("openclipart/test",)


def random_looks(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, 576), dtype=np.uint8)


def test_drawings_that_look_alike_or_are_of_one_series_are_never_parted():
    looks = random_looks(600)
    third = np.arange(0, 600, 3)
    looks[third + 1] = looks[third] // 2  # for every third the same in a lighter colour
    keys = [f"{number:03d}" for number in range(600)]
    series = [f"series {number // 3}" if number % 3 else f"alone {number}" for number in range(600)]  # 1 and 2, 4 and 5
    parts = np.array(split_in_groups(keys, series, looks)).reshape(-1, 3)
    assert (parts == parts[:, :1]).all()
    assert 10 < (parts[:, 0] == TEST).sum() < 50  # 15 % of 200


def test_the_split_does_not_depend_on_the_order_of_the_list():
    looks, keys = random_looks(100), [f"{number:03d}" for number in range(100)]
    looks[50:] = looks[:50]
    forwards = split_in_groups(keys, keys, looks)
    backwards = split_in_groups(keys[::-1], keys[::-1], looks[::-1])
    assert forwards == backwards[::-1]
