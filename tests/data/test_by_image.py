"""A table with one row per caption: for retrieval its rows are grouped, or the other captions of an image are wrong."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path

import pytest
from neuclip.data.by_image import group_by_image
from neuclip.data.fingerprint import count_captions, fingerprint
from neuclip.data.sample import BadSample

from neuclip.data.held_out import open_retrieval
from neuclip.data.open import open_source, open_training_data
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings
from tests.data.small_shards import image_bytes, write_tar
from tests.data.small_tables import write_table as write_parquet_table

IMAGES, EACH = 100, 5
# Captions of one image are not consecutive: every image has its first, then every image its second ...
ROWS = [(f"{number:03d}.png", f"caption {turn} of {number}") for turn in range(EACH) for number in range(IMAGES)]
EXPECTED = [tuple(f"caption {turn} of {number}" for turn in range(EACH)) for number in range(IMAGES)]


def write_images(folder: Path) -> None:
    for number in range(IMAGES):
        (folder / f"{number:03d}.png").write_bytes(image_bytes(number))


def write_csv(folder: Path) -> Path:
    write_images(folder)
    with (folder / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *ROWS])
    return folder / "pairs.csv"


def write_jsonl(folder: Path) -> Path:
    write_images(folder)
    lines = (json.dumps({"image": f"./{name}" if "1" in text else name, "caption": text}) for name, text in ROWS)
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder / "pairs.jsonl"


def write_parquet(folder: Path, paths: bool = False) -> Path:
    write_images(folder)
    images = [name if paths else image_bytes(int(name[:3])) for name, _ in ROWS]
    columns = {"image": images, "caption": [text for _, text in ROWS]}
    write_parquet_table(folder / "pairs.parquet", columns, row_group_size=90)
    return folder / "pairs.parquet"


KINDS = {
    "csv": write_csv,
    "jsonl": write_jsonl,
    "parquet with bytes": write_parquet,
    "parquet with paths": lambda folder: write_parquet(folder, paths=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_image_are_one_sample_with_all_captions_in_order(tmp_path, kind):
    address = str(KINDS[kind](tmp_path))
    assert len(open_source(address)) == IMAGES * EACH  # training draws its samples from the rows, as ever
    source = pickle.loads(pickle.dumps(open_retrieval(address, Settings())))
    assert [source[id].captions for id in range(len(source))] == EXPECTED
    assert [source[id].image for id in (0, 99)] == [image_bytes(0), image_bytes(99)]
    assert str(count_captions(source)) == "100 samples with 500 captions (5 each)"
    # A model that knows nothing finds a caption of the image first in 1.0 % of all cases, not in the 0.2 % of rows.
    chance = sum(len(source[id].captions) for id in range(len(source))) / len(source) / (IMAGES * EACH)
    assert chance == pytest.approx(0.01)


def test_the_grouped_table_has_the_fingerprint_of_a_table_with_lists(tmp_path):
    (tmp_path / "listed.jsonl").write_text(
        "\n".join(json.dumps({"image": f"{k:03d}.png", "caption": texts}) for k, texts in enumerate(EXPECTED))
    )
    grouped = open_retrieval(str(write_csv(tmp_path)), Settings())
    assert fingerprint(grouped) == fingerprint(open_source(str(tmp_path / "listed.jsonl")))


def test_lists_in_rows_of_one_image_are_joined(tmp_path):
    write_images(tmp_path)
    rows = [("000.png", ["a", "b"]), ("001.png", ["c"]), ("000.png", ["d", "e"]), ("gone.png", ["f", "g"])]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"image": name, "caption": texts}) for name, texts in rows))
    source = open_retrieval(str(tmp_path / "x.jsonl"), Settings())
    assert [source[id].captions for id in range(2)] == [("a", "b", "d", "e"), ("c",)]
    assert tuple(count_captions(source)) == (3, 5, 1, 4, 1)
    assert source.where(1).endswith("x.jsonl row 2")


def test_a_row_without_a_caption_is_left_out_and_only_an_image_without_any_is_a_bad_sample(tmp_path, capsys):
    write_images(tmp_path)
    table = "image,caption\n000.png,\n000.png,one\n001.png,\n001.png, \ngone.png,two\ngone.png,three\n"
    (tmp_path / "x.csv").write_text(table)
    source = open_retrieval(str(tmp_path / "x.csv"), Settings())
    assert len(source) == 3 and source[0].captions == ("one",)
    assert source.faults == ()  # these count as bad samples, of which there may be few
    assert "1 of 6 rows have no caption and are left out, the first is" in capsys.readouterr().err
    for id, reason in ((1, "caption is empty"), (2, "image file cannot be read")):
        with pytest.raises(BadSample, match=reason):
            source[id]


def test_held_out_rows_are_one_sample_per_image_and_training_keeps_its_rows(tmp_path):
    flags = ["--data.train", str(write_csv(tmp_path)), "--data.hold_out", "50", "--evaluation.zero_shot", "none"]
    settings = read_settings(None, flags)
    held_out, training = open_retrieval("pairs#held-out", settings), open_training_data(settings)
    assert (len(held_out), len(training)) == (10, 450) and held_out.name == "pairs#held-out"
    assert all(held_out[id].captions in EXPECTED for id in range(10))


def test_an_image_that_two_tables_name_is_one_sample_and_samples_of_shards_stay_apart(tmp_path):
    write_csv(tmp_path)
    (tmp_path / "more.csv").write_text("image,caption\n007.png,another caption\n")
    shard = write_tar(tmp_path / "0.tar", [("0.png", image_bytes(0)), ("0.txt", b"x"), ("1.png", image_bytes(0)),
                                           ("1.txt", b"y")])  # fmt: skip
    source = open_retrieval(f"{tmp_path}/pairs.csv,{shard},{tmp_path}/more.csv", Settings())
    assert len(source) == IMAGES + 2 and source[7].captions == (*EXPECTED[7], "another caption")
    assert [source[id].captions for id in (100, 101)] == [("x",), ("y",)]


def test_a_source_with_an_image_per_sample_stays_itself(tmp_path):
    write_images(tmp_path)
    (tmp_path / "x.csv").write_text("image,caption\n000.png,one\n001.png,two\n")
    source = open_source(str(tmp_path / "x.csv"))
    assert group_by_image(source) is source
