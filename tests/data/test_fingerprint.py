"""The fingerprint of a data set: all captions in order of id count, and how they are stored does not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from neuclip.data.fingerprint import count_captions, fingerprint

from neuclip.data.convert import convert
from neuclip.data.open import open_source
from tests.data.small_shards import image_bytes, write_tar

# Of each sample; what is blank is no caption, and a sample may have none.
CAPTIONS = [
    ["one", "eins", "un"],
    ["two"],
    ["three", " ", "trois"],
    [],
    ["four 4", "vier"],
    [" ", "five"],
    ["six\0é", "a"],
]


def write_json_shards(folder: Path, captions: list[list[str]], shard_size: int = 100) -> Path:
    for first in range(0, len(captions), shard_size):
        members = []
        for number, texts in enumerate(captions[first : first + shard_size], start=first):
            about = json.dumps({"caption": texts}).encode()
            members += [(f"{number:03d}.png", image_bytes(number)), (f"{number:03d}.json", about)]
        write_tar(folder / f"{first:05d}.tar", members)
    return folder


def write_jsonl(folder: Path, captions: list[list[str]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"image": f"{number}.png", "caption": texts}) for number, texts in enumerate(captions)]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder / "pairs.jsonl"


def write_parquet(folder: Path, captions: list[list[str]], with_bytes: bool = True) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra neuclip[parquet] is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    images = [image_bytes(number) if with_bytes else f"{number}.png" for number in range(len(captions))]
    table = pyarrow.table({"image": images, "caption": captions})
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "pairs.parquet", row_group_size=4)
    return folder / "pairs.parquet"


def write_columns(folder: Path, captions: list[list[str]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [[f"{number}.png", *texts, *[""] * (3 - len(texts))] for number, texts in enumerate(captions)]
    lines = ["\t".join(row) for row in [["image", "caption_1", "caption_2", "caption_3"], *rows]]
    (folder / "pairs.tsv").write_text("\n".join(lines))
    return folder / "pairs.tsv"


def write_coco(folder: Path, captions: list[list[str]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "0.png").write_bytes(image_bytes(0))
    listed = {
        "images": [{"id": number, "file_name": f"{number}.png"} for number in range(len(captions))],
        "annotations": [
            {"image_id": number, "caption": text} for number, texts in enumerate(captions) for text in texts
        ],
    }
    (folder / "captions_x.json").write_text(json.dumps(listed))
    return folder / "captions_x.json"


KINDS = {
    "JSON lines": write_jsonl,
    "Parquet with bytes": write_parquet,
    "Parquet with paths": lambda folder, captions: write_parquet(folder, captions, with_bytes=False),
    "columns": write_columns,
    "COCO": write_coco,
    "small shards": lambda folder, captions: write_json_shards(folder, captions, 2),
}


def of(address: Path) -> str:
    return fingerprint(open_source(str(address)))["sha256"]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_captions_have_one_fingerprint_in_whatever_files_they_lie(tmp_path, kind, monkeypatch):
    reference = of(write_json_shards(tmp_path / "reference", CAPTIONS))
    path = KINDS[kind](tmp_path / "data", CAPTIONS)
    assert of(path) == reference
    first = ["one", "two", "three", "", "four 4", "five", "six\0é"]
    for module in ("listed", "arrow"):  # and in whatever pieces they are read
        monkeypatch.setattr(f"neuclip.data.tables.{module}.PIECE", 3)
    assert of(path) == reference and open_source(str(path)).captions() == first
    monkeypatch.setattr("neuclip.data.fingerprint.KEPT_BYTES", 5)
    assert of(path) == reference


@pytest.mark.parametrize("kind", ["JSON lines", "Parquet with bytes", "small shards"])
def test_every_caption_counts_and_whose_it_is(tmp_path, kind):
    others = [
        [["one", "eins"], ["two", "un"], *CAPTIONS[2:]],  # moved to another sample
        [["one", "un", "eins"], *CAPTIONS[1:]],
        [["one", "eins un"], *CAPTIONS[1:]],
        [["one", "1:ein", "s"], *CAPTIONS[1:]],
        [["one"], *CAPTIONS[1:]],
        [*CAPTIONS[:-1], ["six\0é", "b"]],
        [texts[:1] for texts in CAPTIONS],
    ]
    found = [of(KINDS[kind](tmp_path / str(number), one)) for number, one in enumerate([CAPTIONS, *others])]
    assert len(set(found)) == len(found)


def test_one_caption_per_sample_is_hashed_by_length_and_text_alone(tmp_path):
    """As it always was: the records of earlier runs stay comparable."""
    texts = [b"one", "zwei é".encode(), b"", b"3"]
    expected = hashlib.sha256(np.array([len(text) for text in texts], dtype="<i8").tobytes() + b"".join(texts))
    captions = [[text.decode()] for text in texts]
    assert of(write_json_shards(tmp_path / "tar", captions)) == expected.hexdigest()
    assert of(write_jsonl(tmp_path / "jsonl", captions)) == expected.hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_the_fingerprint_of_several_captions_is_that_of_earlier_versions(tmp_path, kind):
    """Counting captions must not change it: checkpoints of earlier runs could not be continued."""
    assert of(KINDS[kind](tmp_path / "data", CAPTIONS)) == (
        "65329edc2132e353fd911b02afb28e0af97a33d80ecad6665e8d52dd143e0536"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_captions_are_counted_without_reading_images(tmp_path, kind):
    address = str(KINDS[kind](tmp_path / "data", CAPTIONS))
    for image in (tmp_path / "data").glob("[1-9].png"):
        image.unlink()
    one, twice, mixed = (open_source(form) for form in (address, address, f"{address},{address}:2"))
    assert count_captions(one) == (7, 11, 1, 3, 1)
    for source, expected in ((twice, (7, 11, 1, 3, 1)), (mixed, (14, 22, 1, 3, 2))):
        fingerprint(source)  # which counts them on its way
        assert source.caption_counts == expected


def test_a_mapped_index_stores_the_fingerprint_of_all_captions(tmp_path, monkeypatch):
    folder = write_json_shards(tmp_path / "shards", CAPTIONS, 2)
    in_memory = of(folder)
    monkeypatch.setattr("neuclip.data.tar.joined_index.MAPPED_FROM", 3)
    for _ in range(2):  # made, then found
        source = open_source(str(folder))
        assert source.captions_sha256 == in_memory and source.joined.place is not None
        assert source.caption_counts == (7, 11, 1, 3, 1)


def test_parts_of_a_mixture_have_the_fingerprint_of_the_whole(tmp_path):
    whole = of(write_jsonl(tmp_path / "whole", CAPTIONS))
    first, second = write_jsonl(tmp_path / "a", CAPTIONS[:3]), write_json_shards(tmp_path / "b", CAPTIONS[3:], 3)
    assert fingerprint(open_source(f"{first},{second}"))["sha256"] == whole


def test_the_captions_of_a_mixture_with_large_parts_are_read_once(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("neuclip.data.tar.joined_index.MAPPED_FROM", 3)
    whole = of(write_jsonl(tmp_path / "whole", CAPTIONS))
    large, small = write_json_shards(tmp_path / "a", CAPTIONS[:5], 3), write_jsonl(tmp_path / "b", CAPTIONS[5:])
    assert fingerprint(open_source(f"{large},{small}"))["sha256"] == whole
    with monkeypatch.context() as unread:
        unread.setattr("neuclip.data.tar.source.TarSource.caption_pieces", None)
        assert fingerprint(open_source(f"{large}:2,{small}")) == {"count": len(CAPTIONS), "sha256": whole}
    assert fingerprint(open_source(f"{small},{large}"))["sha256"] != whole
    for stored in (cache / "fingerprints").iterdir():
        stored.write_text(whole[:30])  # a disk was full
    assert fingerprint(open_source(f"{large},{small}"))["sha256"] == whole
    write_jsonl(tmp_path / "b", [["other"], *CAPTIONS[6:]])
    assert fingerprint(open_source(f"{large},{small}"))["sha256"] != whole


def test_conversion_keeps_the_fingerprint_of_several_captions(tmp_path):
    usable = [texts for texts in CAPTIONS if texts]
    source = open_source(str(write_json_shards(tmp_path / "shards", usable, 2)))
    convert(source, tmp_path / "converted", shard_size=4)
    assert of(tmp_path / "converted") == fingerprint(source)["sha256"]


def test_the_fingerprint_tells_other_captions_apart(tmp_path):
    prints = set()
    for number, captions in enumerate([("ab", "c"), ("a", "bc"), ("c", "ab"), ("ab", "c", "d")]):
        members = [
            m for k, text in enumerate(captions) for m in ((f"{k}.png", image_bytes(k)), (f"{k}.txt", text.encode()))
        ]
        prints.add(fingerprint(open_source(str(write_tar(tmp_path / f"{number}.tar", members))))["sha256"])
    assert len(prints) == 4
