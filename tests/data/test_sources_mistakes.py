"""What people hand over by mistake: it is said in one line, and nothing is cut or left out in silence."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from neuclip.cli import doctor
from neuclip.data.open import open_source, open_training_data
from neuclip.data.sample import BadSample
from neuclip.data.tar import remote
from neuclip.doctor.diagnosis import examine
from neuclip.errors import UserError
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import DataSettings
from tests.images import photo, write_shards


def table(folder: Path, text: str | bytes, name: str = "pairs.csv") -> Path:
    """A table beside the images a.jpg and b.jpg."""
    for image in ("a.jpg", "b.jpg"):
        (folder / image).write_bytes(photo(0))
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


def refusal(address: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_source(str(address))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_row_longer_than_its_header_is_bad_and_not_cut(tmp_path):
    source = open_source(str(table(tmp_path, "image,caption\na.jpg,cut, off\nb.jpg,whole,, \na.jpg,short\n")))
    with pytest.raises(BadSample) as caught:
        source[0]
    assert caught.value.reason == "row has more than the 2 fields of its header" and "row 1" in caught.value.where
    assert source.captions() == ["", "whole", "short"]
    assert source[1].captions == ("whole",) and source[2].captions == ("short",)


def test_a_row_longer_than_its_header_is_listed_where_one_file_serves_a_folder(tmp_path):
    table(tmp_path, "image,caption\na.jpg,cut, off\nb.jpg,whole\n", "captions.csv")
    source = open_source(str(tmp_path))
    assert [(fault.reason, "a.jpg" in fault.where) for fault in source.faults] == [
        ("row has more than the 2 fields of its header", True)
    ]
    assert source.captions() == ["", "whole"]


def test_images_beside_shards_are_said_to_be_left_out(tmp_path, capsys):
    folder = write_shards(tmp_path / "photos", 4, shards=1)
    open_source(str(folder))
    assert capsys.readouterr().err == ""
    for number in range(3):
        (folder / f"{number}.JPG").write_bytes(b"")
    for _ in range(2):
        open_source(str(folder))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "photos: read as tar shards; 3 images beside them are left out" in said[0]


@pytest.mark.parametrize("separator", ["\t", ";", ","])
def test_a_tsv_is_split_at_what_its_header_holds(tmp_path, separator):
    rows = [("filepath", "title"), ("a.jpg", "one"), ("b.jpg", "two")]
    path = table(tmp_path, "".join(f"{separator.join(row)}\n" for row in rows), "pairs.tsv")
    assert open_source(str(path)).captions() == ["one", "two"]


@pytest.mark.parametrize(
    "text",
    [
        "url,caption\nhttps://x.org/a.jpg,one\n",
        "image,caption\nhttp://x.org/a.jpg,one\nHTTPS://x.org/b.jpg,two\n",
        "a cat,http://x.org/a.jpg\na dog,http://x.org/b.jpg\n",
    ],
)
def test_a_table_of_addresses_is_to_be_fetched_first(tmp_path, text):
    assert "its images are URLs" in refusal(table(tmp_path, text)) and "img2dataset" in refusal(tmp_path / "pairs.csv")


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (home / "c.jpg").write_bytes(photo(3))
    source = open_source(str(table(tmp_path, "image,caption\n~/c.jpg,one\n")))
    assert source[0].image == photo(3)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("image,caption\na.jpg,one\n".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        ("image,caption\na.jpg,one\n".encode("utf-16-le"), "NUL bytes"),
        (b"\x00\x01,\x02\n\xff", "NUL bytes"),
        (b" , ,\na.jpg,one,\n", "names no column"),
    ],
)
def test_what_is_no_text_is_no_table(tmp_path, content, told):
    assert told in refusal(table(tmp_path, content))


def test_a_column_without_a_name_harms_nobody(tmp_path):
    source = open_source(str(table(tmp_path, ",image,caption\n0,a.jpg,one\n")))  # as pandas writes its index
    assert source[0].captions == ("one",) and source[0].image == photo(0)


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.jsonl"])
def test_a_table_that_leads_to_no_image_is_refused_with_the_folders_that_were_tried(tmp_path, monkeypatch, name):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    names = [f"images/{number}.jpg" for number in range(30)]
    rows = [json.dumps({"image": one, "caption": "x"}) if name.endswith("l") else f"{one},x" for one in names]
    header = [] if name.endswith("l") else ["image,caption"]
    path = table(tmp_path, "\n".join([*header, *rows]), name)
    with pytest.raises(UserError) as caught:
        open_training_data(DataSettings(train=str(path)))
    told = str(caught.value)
    assert "images/0.jpg" in told and f"neither in {tmp_path} nor in {tmp_path / 'work'}" in told


def test_a_table_whose_rows_are_all_longer_than_its_header_is_refused(tmp_path):
    path = table(tmp_path, "image,caption\n1,a.jpg,x\n2,b.jpg,y\n")  # as R writes row names
    with pytest.raises(UserError, match="none of its 2 rows can be used; of the first: row has more than the 2 fields"):
        open_training_data(DataSettings(train=str(path)))


def test_one_image_that_is_there_is_enough_to_open_a_table(tmp_path):
    path = table(tmp_path, "image,caption\n" + "missing.jpg,x\n" * 19 + "a.jpg,y\n")
    assert len(open_training_data(DataSettings(train=str(path)))) == 20


def test_a_table_without_a_header_is_told_so(tmp_path):
    told = refusal(table(tmp_path, "a.jpg,one\nb.jpg,two\n"))
    assert "first line is taken as the header and looks like data ('a.jpg')" in told and "image,caption" in told


def test_a_disk_or_server_that_fails_during_the_look_is_a_finding(tmp_path, monkeypatch):
    path = table(tmp_path, "image,caption\na.jpg,one\n")

    read = Path.read_bytes

    def fails(self: Path) -> bytes:
        if self.suffix == ".jpg":
            raise OSError(errno.EIO, "Input/output error")
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", fails)
    findings, _ = examine(read_settings(None, ["--data.train", str(path)]))
    assert not findings.ready and "Input/output error" in findings.problems[0].what


def test_a_server_that_is_down_and_a_set_that_is_not_prepared_are_findings(monkeypatch, capsys):
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)  # between tries
    settings = read_settings(None, ["--data.train", "http://127.0.0.1:9/a.tar", "--data.remote_timeout", "1"])
    findings, _ = examine(settings)
    assert not findings.ready and "127.0.0.1" in findings.problems[0].what
    assert doctor.run(["iconify", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert not printed["ready"] and "neuclip data prepare" in printed["problems"][0]["remedy"]
    with pytest.raises(UserError, match="no such file"):
        doctor.run(["nowhere.tar", "--json"])
