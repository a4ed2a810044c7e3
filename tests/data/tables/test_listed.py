"""Images that a table names or holds: what is the data's fault, what is the machine's, and what is none."""

from __future__ import annotations

import base64
import csv
import json
import os
from pathlib import Path

import pytest

from neuclip.data.open import open_source, open_training_data
from neuclip.data.tables.listed import is_base64
from neuclip.errors import RunFailed, UserError
from neuclip.settings.sections import DataSettings, Settings
from tests.builders.images import photo, write_csv
from tests.data.small_shards import contents, image_bytes
from tests.data.small_tables import fault_of, table, write_images


def listing(folder: Path, *names: str) -> Path:
    return table(folder, "image,caption\n" + "".join(f"{name},a caption\n" for name in names))


def test_a_fault_gives_the_reason_that_an_image_cannot_be_read(tmp_path):
    source = open_source(str(listing(tmp_path, "missing.jpg", ".")))
    assert "No such file" in fault_of(source, 0).where
    assert "not a file" in fault_of(source, 1).where


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_or_a_device_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    source = open_source(str(listing(tmp_path, "pipe.jpg", "/dev/zero")))
    for id in range(2):
        fault = fault_of(source, id)
        assert fault.reason == "image file cannot be read" and "not a file" in fault.where


def test_a_file_too_large_for_an_image_is_not_read(tmp_path):
    with (tmp_path / "huge.jpg").open("wb") as file:
        file.truncate(1 << 40)  # a hole: no disk is used
    assert fault_of(open_source(str(listing(tmp_path, "huge.jpg"))), 0).reason == "image file is too large"


def test_running_out_of_open_files_stops_the_run_and_is_not_bad_data(tmp_path):
    resource = pytest.importorskip("resource")
    source = open_source(str(listing(tmp_path, "a.jpg")))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(RunFailed, match="Too many open files") as caught:
            source[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert source[0].captions == ("a caption",)


def test_a_folder_that_goes_while_it_is_read_ends_the_run_and_spoils_no_sample(tmp_path):
    path = write_csv(tmp_path / "table", 3)
    for number in range(3):
        (path.parent / f"{number:06d}.txt").write_text("words")
    sources = [open_source(str(path))]
    path.unlink()
    sources.append(open_source(str(path.parent)))
    (path.parent / "000001.png").unlink()
    for source in sources:
        fault_of(source, 1)
    path.parent.rename(tmp_path / "elsewhere")
    for source in sources:
        with pytest.raises(RunFailed, match=r"table: has gone while it was read; .* --resume"):
            source[1]


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (home / "c.jpg").write_bytes(photo(3))
    source = open_source(str(table(tmp_path, "image,caption\n~/c.jpg,one\n")))
    assert source[0].image == photo(3)


def test_paths_with_backslashes_lead_to_images_unless_a_file_is_called_so(tmp_path):
    write_images(tmp_path / "a", 1)
    (tmp_path / "b\\0.png").write_bytes(image_bytes(5))
    (tmp_path / "pairs.csv").write_text("image,caption\na\\0.png,one\nb\\0.png,two\n")
    (tmp_path / "pairs.jsonl").write_text('{"image": "a\\\\0.png", "caption": "one"}\n')
    assert contents(open_source(str(tmp_path / "pairs.csv"))) == [
        (image_bytes(0), ("one",)),
        (image_bytes(5), ("two",)),
    ]
    assert contents(open_training_data(Settings(data=DataSettings(train=str(tmp_path / "pairs.jsonl"))))) == [
        (image_bytes(0), ("one",))
    ]


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.jsonl"])
def test_a_table_that_leads_to_no_image_is_refused_with_the_folders_that_were_tried(tmp_path, monkeypatch, name):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    names = [f"images/{number}.jpg" for number in range(30)]
    rows = [json.dumps({"image": one, "caption": "x"}) if name.endswith("l") else f"{one},x" for one in names]
    header = [] if name.endswith("l") else ["image,caption"]
    path = table(tmp_path, "\n".join([*header, *rows]), name)
    with pytest.raises(UserError) as caught:
        open_training_data(Settings(data=DataSettings(train=str(path))))
    message = str(caught.value)
    assert "images/0.jpg" in message and f"neither in {tmp_path} nor in {tmp_path / 'work'}" in message


def test_a_table_whose_rows_are_all_longer_than_its_header_is_refused(tmp_path):
    path = table(tmp_path, "image,caption\n1,a.jpg,x\n2,b.jpg,y\n")  # as R writes row names
    with pytest.raises(UserError, match="none of its 2 rows can be used; of the first: row has more than the 2 fields"):
        open_training_data(Settings(data=DataSettings(train=str(path))))


def test_one_image_that_is_there_is_enough_to_open_a_table(tmp_path):
    path = table(tmp_path, "image,caption\n" + "missing.jpg,x\n" * 19 + "a.jpg,y\n")
    assert len(open_training_data(Settings(data=DataSettings(train=str(path))))) == 20


def encoded(number: int, form: str) -> str:
    text = base64.b64encode(image_bytes(number, form)).decode()
    return text if number % 2 else f"data:image/{form};base64,{text}"


def write_base64(folder: Path) -> dict[str, Path]:
    rows = [(encoded(number, form), f"cap {number}") for number, form in enumerate(["png", "jpg", "webp", "gif"])]
    rows.append(("/9j/" + "A" * 100_001, "cap 4"))
    paths = {kind: folder / f"pairs.{kind}" for kind in ("csv", "tsv", "jsonl")}
    for kind, separator in (("csv", ","), ("tsv", "\t")):
        with paths[kind].open("w", newline="") as file:
            csv.writer(file, delimiter=separator).writerows([("image", "caption"), *rows])
    with paths["jsonl"].open("w") as file:
        file.writelines(json.dumps({"image": image, "caption": caption}) + "\n" for image, caption in rows)
    return paths


def check_base64(source) -> None:
    assert [source[id].image for id in range(4)] == [
        image_bytes(number, form) for number, form in enumerate(["png", "jpg", "webp", "gif"])
    ]
    bad = fault_of(source, 4)
    assert bad.reason == "image is not whole base64" and len(bad.where) < 300


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_images_in_base64_are_read_and_announced(tmp_path, capsys, kind):
    path = write_base64(tmp_path)[kind]
    check_base64(open_training_data(Settings(data=DataSettings(train=str(path)))))
    assert f"{path}: its images are base64 text" in capsys.readouterr().err


def test_images_in_base64_of_parquet_are_read_row_group_by_row_group(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in write_base64(tmp_path)["jsonl"].read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    source = open_source(str(tmp_path / "pairs.parquet"))
    check_base64(source)
    assert not hasattr(source, "rows") and "base64" in capsys.readouterr().err


def test_a_path_is_not_taken_for_base64():
    paths = ["/9j/photos/of/my/holidays/in/two/thousand/a.jpg", "iVBORaa.png", "R0lGOD", "data:image/a.png", "UklGR/a"]
    assert not any(is_base64(path.encode()) for path in paths)
