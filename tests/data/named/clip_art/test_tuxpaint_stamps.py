from __future__ import annotations

import io
import json
import tarfile

import pytest
from PIL import Image

from neuclip.data.convert import convert
from neuclip.data.named.builtin import builtin_folder
from neuclip.data.named.clip_art.tuxpaint import read_captions
from neuclip.data.source import open_source

STAMPS = "usr/share/tuxpaint/stamps"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9" fill="blue"/></svg>'


@pytest.fixture
def prepared(put_package, encoded):
    put_package(
        "tuxpaint-stamps-default",
        {
            f"{STAMPS}/animals/birds/toucan.png": encoded("PNG", (50, 20), (9, 9, 9, 255), "RGBA"),
            f"{STAMPS}/animals/birds/toucan.txt": b"A toucan.\nde.utf8=Ein Tukan.\nfr.utf8=\n",
            f"{STAMPS}/food/bee.png": encoded("PNG", (30, 30), "red"),
            f"{STAMPS}/food/bee.svg": SVG,
            f"{STAMPS}/food/bee.txt": b" A  bee. \nfr.utf8=Une abeille.\n",
            f"{STAMPS}/food/tug.svg": SVG,
            f"{STAMPS}/food/tug.txt": b"A tug boat.",
            f"{STAMPS}/food/tug_mirror.png": encoded("PNG", (30, 30), "green"),
            f"{STAMPS}/food/gift.txt": b"A gift.",
            f"{STAMPS}/food/empty.png": encoded("PNG", (30, 30), "yellow"),
            f"{STAMPS}/food/empty.txt": b"\nde.utf8=Nichts.\n",
        },
    )
    return builtin_folder("tuxpaint")


def samples(folder) -> dict[str, tuple[Image.Image, dict]]:
    with tarfile.open(folder / "test" / "00000.tar") as tar:
        found = {name: tar.extractfile(name).read() for name in tar.getnames()}
    keys = [name.removesuffix(".txt") for name in found if name.endswith(".txt")]
    return {
        found[f"{key}.txt"].decode(): (Image.open(io.BytesIO(found[f"{key}.png"])), json.loads(found[f"{key}.json"]))
        for key in keys
    }


def test_every_stamp_has_its_sentence_category_licence_and_translations(prepared):
    found = samples(prepared)
    assert set(found) == {"A toucan.", "A bee.", "A tug boat."}
    about = found["A toucan."][1]
    assert about["category"] == "animals/birds" and about["license"] == "GPL-2.0-or-later"
    assert about["caption_de"] == "Ein Tukan." and "caption_fr" not in about


def test_of_two_pictures_of_a_stamp_the_png_is_taken(prepared):
    found = samples(prepared)
    middle = {caption: image.getpixel((image.width // 2,) * 2) for caption, (image, _) in found.items()}
    assert middle["A bee."] == (255, 0, 0) and middle["A tug boat."] == (0, 0, 255)


def test_what_is_left_out_is_counted_by_reason(prepared):
    assert json.loads((prepared / "BUILD.json").read_text())["left_out"] == {
        "equal to another picture": 0,
        "mirrored or other picture without a text": 1,
        "no caption": 1,
        "text without a picture": 1,
    }


def test_one_language_can_be_converted_into_a_test_set_of_its_own(prepared, tmp_path):
    done = convert(open_source("tuxpaint", caption_key="caption_de"), tmp_path / "german")
    assert (done.samples, done.skipped.total()) == (1, 2)
    assert open_source(str(tmp_path / "german")).captions() == ["Ein Tukan."]


def test_translations_are_composed_and_need_no_order():
    assert read_captions("Cafe\u0301\nzh_TW.utf8=\u5496\u5561\nca@valencia.utf8= cafe\u0301 \n# odd line\n") == {
        "caption": "Caf\u00e9",
        "caption_ca@valencia": "caf\u00e9",
        "caption_zh_TW": "\u5496\u5561",
    }
