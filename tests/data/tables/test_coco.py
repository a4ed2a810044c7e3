"""COCO's caption files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from neuclip.data.open import open_source
from tests.builders.images import photo
from tests.data.small_tables import outcomes, refusal


def write_coco(folder: Path, *, images: str = "train2017", annotations: str = "annotations") -> Path:
    """COCO's layout: images in a folder, captions in a file of another one, two per image."""
    (folder / images).mkdir(parents=True, exist_ok=True)
    (folder / annotations).mkdir(parents=True, exist_ok=True)
    for number in range(4):
        (folder / images / f"{number}.jpg").write_bytes(photo(number))
    listed = {
        "info": {"year": 2017},
        "images": [{"id": 100 - number, "file_name": f"{number}.jpg", "height": 1} for number in (2, 0, 3, 1)],
        "annotations": [
            {"id": 10 * turn + number, "image_id": 100 - number, "caption": f"{'ab'[turn]} {number}\n"}
            for turn in (0, 1)
            for number in (0, 1, 2, 9)
        ],
    }
    (folder / annotations / "captions_train2017.json").write_text(json.dumps(listed))
    return folder / annotations / "captions_train2017.json"


@pytest.mark.parametrize(
    "places", [{}, {"annotations": "."}, {"images": "images/train2017"}, {"images": ".", "annotations": "."}]
)
def test_coco_captions_are_read_with_all_captions_of_an_image(tmp_path, places):
    source = open_source(str(write_coco(tmp_path, **places)))
    assert len(source) == 4 and source.captions() == ["a 2", "a 0", "", "a 1"]
    assert source[0].captions == ("a 2", "b 2") and source[1].image == photo(0)
    assert outcomes(source)[2] == "caption is missing" and source.where(2).endswith("captions_train2017.json: 3.jpg")
    assert [(fault.id, fault.reason, fault.times) for fault in source.faults] == [(-1, "no image", 1)] * 2
    copy = pickle.loads(pickle.dumps(source))
    assert (copy[3].image, copy[3].captions) == (photo(1), ("a 1", "b 1"))


def test_messages_of_coco_files_say_what_to_do(tmp_path):
    path = write_coco(tmp_path)
    whole = path.read_text()
    assert f"did you mean {path}" in refusal(path.parent)
    (tmp_path / "train2017").rename(tmp_path / "elsewhere")
    assert f"put the images into {tmp_path / 'train2017'}" in refusal(path)
    path.write_text(whole.replace('"caption"', '"bbox"'))
    assert "no captions in its annotations" in refusal(path)
    for content in ('[{"image": "a.jpg", "caption": "x"}]', "{}", '{"images": 1, "annotations": []}'):
        path.write_text(content)
        assert ".jsonl" in refusal(path)
    path.write_text(whole[:-20])
    assert "is not a JSON file" in refusal(path)
    path.write_text('{"images": [], "annotations": [{"caption": "x", "image_id": [1]}]}')
    assert "has no images" in refusal(path)
