"""Files of images and texts, and their names: what is the data's fault, what is the machine's, and what is none."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuclip.data.captions import strip_blanks
from neuclip.data.convert import convert
from neuclip.data.fingerprint import fingerprint
from neuclip.data.open import open_source
from neuclip.data.sample import BadSample
from neuclip.errors import RunFailed, UserError
from tests.images import photo, write_csv


def table(folder: Path, *names: str) -> Path:
    path = folder / "pairs.csv"
    path.write_text("image,caption\n" + "".join(f"{name},a caption\n" for name in names))
    return path


def fault_of(source, id: int) -> BadSample:
    with pytest.raises(BadSample) as caught:
        source[id]
    return caught.value


@pytest.mark.parametrize("ending", ["TXT", "Txt", "txt"])
def test_a_text_file_is_found_however_its_ending_is_written(tmp_path, ending):
    (tmp_path / "IMG_0.JPG").write_bytes(photo(0))
    (tmp_path / f"IMG_0.{ending}").write_text("a caption")
    (tmp_path / f"alone.{ending}").write_text("nobody's")
    source = pickle.loads(pickle.dumps(open_source(str(tmp_path))))
    assert source[0].captions == ("a caption",) and source.captions() == ["a caption"]
    assert source.faults[0].where == str(tmp_path / f"alone.{ending}")


def test_a_folder_that_goes_while_it_is_read_ends_the_run_and_spoils_no_sample(tmp_path):
    table = write_csv(tmp_path / "table", 3)
    for number in range(3):
        (table.parent / f"{number:06d}.txt").write_text("words")
    sources = [open_source(str(table))]
    table.unlink()
    sources.append(open_source(str(table.parent)))
    (table.parent / "000001.png").unlink()
    for source in sources:
        with pytest.raises(BadSample):
            source[1]
    table.parent.rename(tmp_path / "elsewhere")
    for source in sources:
        with pytest.raises(RunFailed, match=r"table: has gone while it was read; .* --resume"):
            source[1]


def test_a_table_in_another_encoding_is_refused_and_one_with_a_bad_row_is_read(tmp_path):
    rows = [f"{number}.png,{'grün' if number % 3 else 'rot'}" for number in range(30)]
    (tmp_path / "all.csv").write_bytes("\n".join(["image,caption", *rows]).encode("cp1252"))
    with pytest.raises(UserError, match=r"all\.csv: is not UTF-8 \(line 3 and 19 others .*CSV UTF-8"):
        open_source(str(tmp_path / "all.csv"))
    (tmp_path / "one.csv").write_bytes("\n".join(["image,caption", *rows]).encode().replace("ü".encode(), b"\xfc", 1))
    assert len(open_source(str(tmp_path / "one.csv"))) == 30
    (tmp_path / "sep.csv").write_text("sep=;\nimage;caption\n0.png;red\n")
    with pytest.raises(UserError, match="'sep=;'"):
        open_source(str(tmp_path / "sep.csv"))


def test_an_address_longer_than_a_file_name_is_read_part_by_part(tmp_path):
    (tmp_path / "a.jpg").write_bytes(photo(0))
    path = table(tmp_path, "a.jpg")
    assert len(open_source(",".join([str(path)] * 300))) == 300
    shard = convert(open_source(str(path)), tmp_path / "shards") and tmp_path / "shards" / "00000.tar"
    braces = tmp_path / "shards" / f"{{{','.join(['00000'] * 60)}}}.tar"
    assert shard.exists() and len(open_source(str(braces))) == 1
    for address in ("x" * 5000, "x" * 300 + ".csv", "x" * 300 + ":2", "{" + "x" * 300 + ",y}.tar"):
        with pytest.raises(UserError) as caught:
            open_source(address)
        assert "\n" not in str(caught.value)


def test_the_reason_that_a_image_cannot_be_read_is_told(tmp_path):
    source = open_source(str(table(tmp_path, "missing.jpg", ".")))
    assert "No such file" in fault_of(source, 0).where
    assert "not a file" in fault_of(source, 1).where


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_or_a_device_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    source = open_source(str(table(tmp_path, "pipe.jpg", "/dev/zero")))
    for id in range(2):
        fault = fault_of(source, id)
        assert fault.reason == "image file cannot be read" and "not a file" in fault.where


def test_a_file_too_large_for_a_image_is_not_read(tmp_path):
    with (tmp_path / "huge.jpg").open("wb") as file:
        file.truncate(1 << 40)  # a hole: no disk is used
    assert fault_of(open_source(str(table(tmp_path, "huge.jpg"))), 0).reason == "image file is too large"


def test_running_out_of_open_files_stops_the_run_and_is_not_bad_data(tmp_path):
    resource = pytest.importorskip("resource")
    (tmp_path / "a.jpg").write_bytes(photo(0))
    source = open_source(str(table(tmp_path, "a.jpg")))
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


@given(st.text(alphabet="a \0\t\n\u3000\x1f\x85", max_size=8))
def test_stripping_twice_is_stripping_once(text):
    once = strip_blanks(text)
    assert strip_blanks(once) == once == once.strip() and not once.startswith("\0")


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
