"""Folders of images, with a text beside each or one captions file for all."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from neuclip.data.fingerprint import fingerprint
from neuclip.data.tables.columns import ColumnChoice

from neuclip.data.convert import convert
from neuclip.data.open import open_source
from neuclip.data.tables.arrow import holds_images
from neuclip.data.tables.folder import open_folder
from neuclip.errors import UserError
from tests.data.small_tables import COUNT, NUMBERS, name, outcomes, table, write_folder, write_images
from tests.images import photo


@pytest.mark.parametrize("ending", ["TXT", "Txt", "txt"])
def test_a_text_file_is_found_however_its_ending_is_written(tmp_path, ending):
    (tmp_path / "IMG_0.JPG").write_bytes(photo(0))
    (tmp_path / f"IMG_0.{ending}").write_text("a caption")
    (tmp_path / f"alone.{ending}").write_text("nobody's")
    source = pickle.loads(pickle.dumps(open_source(str(tmp_path))))
    assert source[0].captions == ("a caption",) and source.captions() == ["a caption"]
    assert source.faults[0].where == str(tmp_path / f"alone.{ending}")


def test_captions_lie_in_files_named_in_any_of_the_usual_ways(tmp_path):
    json_too = {"txt": b"cap {}", "json": b'{"caption": "other"}', "caption": b"third"}
    only_json = {"json": b'{"caption": "cap {}", "url": "http://x"}'}
    for number, ways in enumerate(
        [{"txt": b"cap {}"}, {"png_txt": b"cap {}"}, {"caption": b"cap {}"}, only_json, json_too]
    ):
        folder = write_images(tmp_path / str(number), 2, **ways)
        (folder / "stats.json").write_text("{}")
        source = pickle.loads(pickle.dumps(open_source(str(folder))))
        assert source.captions() == ["cap 0", "cap 1"] == [source[id].captions[0] for id in range(2)]
        assert source.faults == ()
    (folder / "9.caption").write_text("alone")
    assert [fault.where for fault in open_source(str(folder)).faults] == [str(folder / "9.caption")]


def test_several_captions_in_a_json_file_count_in_the_fingerprint_as_in_a_table(tmp_path):
    folder = write_images(tmp_path / "folder", 1, json=b'{"caption": ["one", "two"]}')
    (tmp_path / "pairs.jsonl").write_text('{"image": "folder/0.png", "caption": ["one", "two"]}')
    inside = open_source(str(folder))
    assert inside[0].captions == ("one", "two")
    assert fingerprint(inside) == fingerprint(open_source(str(tmp_path / "pairs.jsonl")))


def test_images_none_of_which_has_a_text_are_refused_whatever_else_lies_there(tmp_path):
    folder = write_images(tmp_path / "folder", 2)
    (folder / "00000_stats.json").write_text("{}")
    with pytest.raises(UserError, match="2 images but no captions"):
        open_source(str(folder))


def img2dataset_files(folder: Path) -> Path:
    """As `--output_format files` leaves it."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    for shard in ("00000", "00001"):
        write_images(folder / shard, 2, txt=b"cap {}", json=b'{"caption": "cap {}", "status": "success"}')
        table = {"url": ["http://x/1", "http://x/2"], "caption": ["a", "b"], "key": ["0", "1"], "width": [3, 4]}
        parquet.write_table(pyarrow.table(table), folder / f"{shard}.parquet")
        (folder / f"{shard}_stats.json").write_text('{"count": 2}')
    return folder


def test_the_folder_that_img2dataset_writes_is_one_of_images_and_its_table_of_addresses_is_none(tmp_path):
    folder = img2dataset_files(tmp_path / "fetched")
    assert not holds_images(folder / "00000.parquet", ColumnChoice())
    source = open_folder("fetched", folder, ColumnChoice())
    assert source.captions() == ["cap 0", "cap 1"] * 2 and source.faults == ()
    assert [source.where(id).removeprefix(f"{folder}/") for id in (0, 3)] == ["00000/0.png", "00001/1.png"]


def test_an_image_without_a_caption_keeps_its_id_and_a_caption_without_an_image_is_listed(tmp_path):
    write_folder(tmp_path)
    (tmp_path / name(NUMBERS[2])).with_suffix(".txt").unlink()
    for number in range(14):
        (tmp_path / f"lonely{number:02d}.txt").write_text("x")
    (tmp_path / "scan.heic").write_bytes(b"x")
    source = open_source(str(tmp_path))
    assert len(source) == COUNT and source.captions()[2] == "" and outcomes(source)[2] == "caption is missing"
    assert source.where(2).endswith(name(NUMBERS[2]))
    assert {(fault.id, fault.reason, Path(fault.where).name, fault.times) for fault in source.faults} == {
        (-1, "kind of image is not read", "scan.heic", 1),
        *((-1, "no image", f"lonely{number:02d}.txt", 1) for number in range(9)),
        (-1, "no image", "lonely09.txt and 4 more", 5),
    }


def test_a_text_beside_an_image_is_one_caption_whatever_its_lines(tmp_path):
    (tmp_path / "a.png").write_bytes(photo(0))
    (tmp_path / "a.txt").write_text("first line\nsecond line\n")
    assert open_source(str(tmp_path))[0].captions == ("first line\nsecond line",)


def test_converting_captions_with_zeros_and_blanks_keeps_the_fingerprint(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, text in enumerate(["a \0", "\0 b", "c\0 \0\n"]):
        (folder / f"{number}.jpg").write_bytes(photo(number))
        (folder / f"{number}.txt").write_text(text)
    before = open_source(str(folder))
    convert(before, tmp_path / "shards")
    assert before.captions() == ["a", "b", "c"]
    assert fingerprint(open_source(str(tmp_path / "shards"))) == fingerprint(before)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("captions.txt", "image,caption\n{0},one\n{0},two\n{1},three\nno.jpg,four\n"),
        ("captions.txt", "{0}#0\tone\n{0}#1\ttwo\n{1}#0\tthree\nno.jpg#0\tfour\n"),
        ("captions.txt", "{0} one\n{0} two\n{1} three\nno.jpg four\n"),
        ("captions.csv", "file_name,text\n{0},one\n{0},two\n{1},three\nno.jpg,four\n"),
        ("metadata.jsonl", '{{"file_name": "{0}", "text": ["one", "two"]}}\n{{"file_name": "{1}", "text": "three"}}\n'
         '{{"file_name": "../no.jpg", "text": "four"}}\n'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("names", [("a.jpg", "b.jpg"), ("deep/er/a.jpg", "b.jpg")])
def test_one_captions_file_serves_a_folder(tmp_path, file, text, names):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for number, path in enumerate(("deep/er/a.jpg", "b.jpg", "c.jpg")):
        (tmp_path / path).write_bytes(photo(number))
    (tmp_path / file).write_text(text.format(*names))
    source = open_source(str(tmp_path))
    assert [source.where(id).removeprefix(f"{tmp_path}/") for id in range(3)] == ["b.jpg", "c.jpg", "deep/er/a.jpg"]
    assert outcomes(source) == ["three", "caption is missing", "one"] and source[2].captions == ("one", "two")
    assert [(fault.id, fault.reason) for fault in source.faults] == [(-1, "no image")]


def test_a_file_name_that_two_images_share_is_not_guessed(tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "x.jpg").write_bytes(photo(0))
    (tmp_path / "captions.csv").write_text("image,caption\nx.jpg,which?\na/x.jpg,this\n")
    source = open_source(str(tmp_path))
    assert outcomes(source) == ["this", "caption is missing"] and "row 1: x.jpg" in source.faults[0].where


def test_a_row_longer_than_its_header_is_listed_where_one_file_serves_a_folder(tmp_path):
    table(tmp_path, "image,caption\na.jpg,cut, off\nb.jpg,whole\n", "captions.csv")
    source = open_source(str(tmp_path))
    assert [(fault.reason, "a.jpg" in fault.where) for fault in source.faults] == [
        ("row has more than the 2 fields of its header", True)
    ]
    assert source.captions() == ["", "whole"]


def paths_in(folder: Path) -> list[str]:
    source = open_source(str(folder))
    return [source.where(id).removeprefix(f"{folder}/") for id in range(len(source))]


def write_pair(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".jpg").write_bytes(photo(0))
    path.with_suffix(".txt").write_text(path.name)


def test_links_to_folders_are_followed_and_circles_end(tmp_path):
    folder, elsewhere = tmp_path / "photos", tmp_path / "elsewhere"
    for path in (folder / "b" / "1", folder / "z", elsewhere / "2", elsewhere / "deep" / "3", tmp_path / "outside"):
        write_pair(path)
    (folder / "a").symlink_to(elsewhere)
    (folder / "c").symlink_to("b")  # beside it: read once, under its own path
    (folder / "b" / "again").symlink_to(folder)  # circles: to a folder above, there and back, out of it all
    (elsewhere / "deep" / "back").symlink_to(folder)
    (elsewhere / "same").symlink_to(elsewhere / "deep")
    (folder / "up").symlink_to("..")
    (folder / ".hidden").symlink_to(tmp_path)
    assert paths_in(folder) == ["a/2.jpg", "a/deep/3.jpg", "b/1.jpg", "z.jpg"]
    assert open_source(str(folder)).captions() == ["2", "3", "1", "z"]
    (tmp_path / "link").symlink_to(folder)
    assert paths_in(tmp_path / "link") == paths_in(folder)


def test_a_captions_file_names_images_behind_a_link(tmp_path):
    write_pair(tmp_path / "elsewhere" / "1")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "photos" / "captions.csv").write_text("image,caption\na/1.jpg,one\n")
    assert open_source(str(tmp_path / "photos"))[0].captions == ("one",)
