"""Karpathy's split files: measured on the test split alone, with all captions of an image; trained on the others."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from neuclip.data.sample import BadSample

from neuclip.data.held_out import open_retrieval
from neuclip.data.open import open_source
from neuclip.errors import UserError
from neuclip.settings.sections import DataSettings, Settings
from tests.data.small_shards import image_bytes

SPLITS = ["test", "train", "restval", "val", "test", "train"]


def captions(number: int) -> list[str]:
    return [f'caption {k}, "quoted" of {number}' for k in range(5 + number % 2)]


def image_folder(number: int, coco: bool) -> str:
    return f"{'train' if SPLITS[number] == 'train' else 'val'}2014" if coco else ""


def write_images(folder: Path, coco: bool = False) -> None:
    for number in range(len(SPLITS)):
        place = folder / image_folder(number, coco) / f"{number}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(image_bytes(number, "jpg"))


def write_json(path: Path, coco: bool = False) -> Path:
    images = [
        {
            "filename": f"{number}.jpg",
            **({"filepath": image_folder(number, coco)} if coco else {}),
            "split": split,
            "imgid": number,
            "sentences": [{"raw": text, "tokens": text.split(), "sentid": 0} for text in captions(number)],
        }
        for number, split in enumerate(SPLITS)
    ]
    path.write_text(json.dumps({"images": images, "dataset": "x"}))
    return path


def write_csv(path: Path, spell=json.dumps) -> Path:
    with path.open("w", newline="") as file:
        rows = [[spell(captions(number)), "[0]", split, f"{number}.jpg", number] for number, split in enumerate(SPLITS)]
        csv.writer(file).writerows([["raw", "sentids", "split", "filename", "img_id"], *rows])
    return path


KINDS = {
    "json": lambda folder: write_json(folder / "dataset_flickr30k.json"),
    "csv": lambda folder: write_csv(folder / "flickr_annotations_30k.csv"),
    "csv as Python writes lists": lambda folder: write_csv(folder / "flickr.csv", repr),
}


@pytest.mark.parametrize("kind", KINDS)
def test_retrieval_reads_the_test_split_and_training_the_others(tmp_path, kind, capsys):
    write_images(tmp_path / "flickr30k-images")
    path = KINDS[kind](tmp_path)
    # Columns that other tables of a run have do not hold here.
    source = open_retrieval(str(path), Settings(data=DataSettings(image_column="", caption_column="words")))
    assert [source[id].captions for id in range(len(source))] == [tuple(captions(0)), tuple(captions(4))]
    assert source[1].image == image_bytes(4, "jpg") and source.where(1) == f"{path}: 4.jpg"
    training = open_source(str(path))
    assert [training[id].captions for id in range(len(training))] == [tuple(captions(k)) for k in (1, 2, 5)]
    assert source.places().isdisjoint(training.places())  # one file, and no image on both sides
    printed = capsys.readouterr().err
    assert (
        f"2 images from {tmp_path}/flickr30k-images, 10 captions; of its splits only test (2) for retrieval" in printed
    )
    assert "17 captions; of its splits only train (2), restval (1) for training" in printed


def test_images_of_coco_lie_in_the_folders_that_the_file_names_or_all_in_one(tmp_path):
    for name, coco in (("folders", True), ("one", False)):
        write_images(tmp_path / name / "images", coco)
        source = open_source(str(write_json(tmp_path / name / "dataset_coco.json", coco=True)))
        assert [source[id].image for id in range(3)] == [image_bytes(number, "jpg") for number in (1, 2, 5)]


def test_files_of_no_use_are_refused_in_one_line(tmp_path):
    path = write_csv(tmp_path / "x.csv")
    for spoil, message in (
        (lambda: None, r"x.csv: its first image '0.jpg' is neither beside it nor in a folder there; put them there"),
        (lambda: (tmp_path / "a.zip").write_bytes(b""), r"; unzip .*/a.zip there"),
        (lambda: write_images(tmp_path), None),
        (lambda: path.write_text(path.read_text().replace("test", "nil")), r"no image of the split test; .*nil \(2\)"),
        (lambda: path.write_text("raw,split,filename\nno list,test,0.jpg\n"), r"x.csv row 1: raw is no list of captio"),
    ):
        spoil()
        if message is None:
            assert len(open_retrieval(str(path), Settings())) == 2
            continue
        with pytest.raises(UserError, match=message) as caught:
            open_retrieval(str(path), Settings())
        assert "\n" not in str(caught.value)


def test_an_image_without_captions_and_a_missing_one_are_bad_samples(tmp_path):
    write_images(tmp_path)
    path = tmp_path / "dataset.json"
    entries = [("0.jpg", [{"raw": "a"}]), ("1.jpg", []), ("gone.jpg", [{"raw": "b"}]), ("", [{"raw": "c"}])]
    path.write_text(json.dumps({"images": [{"filename": n, "sentences": s, "split": "test"} for n, s in entries]}))
    source = open_retrieval(str(path), Settings())
    assert source[0].captions == ("a",) and len(source) == 4
    for id, reason in ((1, "caption is missing"), (2, "image file cannot be read"), (3, "no image")):
        with pytest.raises(BadSample, match=reason):
            source[id]
