"""Which columns hold images and captions."""

from __future__ import annotations

import json

import pytest

from neuclip.data.open import open_source
from tests.builders.images import photo
from tests.data.small_shards import image_bytes
from tests.data.small_tables import outcomes, refusal, table, write_table


def test_named_columns_win_over_usual_names(tmp_path):
    (tmp_path / "0.png").write_bytes(image_bytes(0))
    (tmp_path / "pairs.tsv").write_text("caption\tdeutsch\timage\tphoto\nred\trot\tnone.png\t0.png\n")
    source = open_source(str(tmp_path / "pairs.tsv"), image_column="photo", caption_column="deutsch")
    assert source[0].captions == ("rot",)


@pytest.mark.parametrize("choice", ["", "caption_1,caption_2"])
def test_several_caption_columns_are_several_captions(tmp_path, choice):
    (tmp_path / "0.jpg").write_bytes(photo(0))
    (tmp_path / "pairs.csv").write_text("image,caption_2,caption_1\n0.jpg,two,one\n0.jpg,only,\n")
    source = open_source(str(tmp_path / "pairs.csv"), caption_column=choice)
    assert source[0].captions == ("one", "two") and source[1].captions == ("only",)
    assert source.captions() == ["one", "only"]


def test_a_list_is_several_captions_in_json_lines_and_parquet(tmp_path):
    (tmp_path / "0.jpg").write_bytes(photo(0))
    captions = [["one", " ", "two"], ["three"], []]
    lines = [json.dumps({"image": {"path": "0.jpg"}, "captions": texts}) for texts in captions]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + "\n")
    write_table(tmp_path / "a.parquet", {"jpg": [photo(0)] * 3, "captions": captions})
    for ending in ("jsonl", "parquet"):
        source = open_source(str(tmp_path / f"a.{ending}"))
        assert source[0].captions == ("one", "two") and source.captions() == ["one", "three", ""]
        assert outcomes(source)[2] == "caption is missing"


@pytest.mark.parametrize(
    "text",
    [
        "url,caption\nhttps://x.org/a.jpg,one\n",
        "image,caption\nhttp://x.org/a.jpg,one\nHTTPS://x.org/b.jpg,two\n",
        "a cat,http://x.org/a.jpg\na dog,http://x.org/b.jpg\n",
    ],
)
def test_a_table_of_urls_is_refused_and_img2dataset_named(tmp_path, text):
    assert "its images are URLs" in refusal(table(tmp_path, text)) and "img2dataset" in refusal(tmp_path / "pairs.csv")
