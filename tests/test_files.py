"""Files are read, written and locked so that nothing that lies there can harm or hang, and what fails is one line."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest

from neuclip import files
from neuclip.errors import RunFailed, UserError
from neuclip.files import append_text, lock, new_file, new_folder, open_regular, read_json, read_regular, write_text
from neuclip.records import append_line, keep_up_to, read_lines, write_json
from tests.builders.processes import start


def test_a_file_is_replaced_in_one_move_and_an_error_leaves_the_old_one_alone(tmp_path):
    place = tmp_path / "deep" / "x.txt"
    write_text(place, "old")
    with pytest.raises(KeyError), new_file(place) as file:
        file.write(b"half")
        raise KeyError
    assert place.read_text() == "old" and [path.name for path in place.parent.iterdir()] == ["x.txt"]
    write_json(place, {"a": 1, "b": float("nan")})
    assert json.loads(place.read_text()) == {"a": 1, "b": None}


def test_a_folder_appears_whole_replaces_nothing_and_an_error_leaves_none(tmp_path):
    (tmp_path / "x").mkdir()  # an empty one may be replaced
    with new_folder(tmp_path / "x") as unfinished:
        (unfinished / "a").write_text("a")
        assert not list((tmp_path / "x").iterdir())
    assert (tmp_path / "x" / "a").read_text() == "a"
    with pytest.raises(UserError, match="x exists; give another folder, or remove it"), new_folder(tmp_path / "x"):
        pass
    with pytest.raises(UserError, match="y exists"), new_folder(tmp_path / "y"):
        (tmp_path / "y").write_text("faster")
    with pytest.raises(KeyError), new_folder(tmp_path / "z"):
        raise KeyError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


WRITERS = {
    "replace": lambda path: write_text(path, "new"),
    "append": lambda path: append_text(path, "new"),
    "record": lambda path: append_line(path, {"new": 1}),
    "lock": lambda path: lock(path).__enter__(),
    "cut": lambda path: keep_up_to(path, 1),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_no_write_follows_a_link(tmp_path, writer):
    victim = tmp_path / "victim"
    victim.write_text('{"samples": 2}\n')
    for name in ("x", "x.partial", ".x.part"):
        (tmp_path / name).symlink_to(victim)
    try:
        WRITERS[writer](tmp_path / "x")
    except OSError as refusal:
        assert "symbolic links" in str(refusal)
    assert victim.read_text() == '{"samples": 2}\n'
    assert writer in ("append", "record", "lock") or not (tmp_path / "x").is_symlink()


def write_often(path: Path, letter: str) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(60):
        write_text(path, letter * 5000)


def test_two_writers_of_one_file_and_a_reader_never_see_half_a_file(tmp_path):
    place = tmp_path / "report.html"
    write_text(place, "a" * 5000)
    writers = [start(write_often, place, letter) for letter in "ab"]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
        writer.stdin.write("\n")
        writer.stdin.flush()
    for _ in range(200):
        assert place.read_text() in ("a" * 5000, "b" * 5000)
    assert [writer.wait().code for writer in writers] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("private", "mask", "mode"), [(False, 0o022, 0o644), (False, 0o077, 0o600), (True, 0o022, 0o600)]
)
def test_new_files_have_the_usual_mode_and_private_ones_are_for_their_owner(tmp_path, private, mask, mode):
    before = os.umask(mask)
    try:
        write_text(tmp_path / "x", "secret", private=private)
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == mode


def test_pipes_devices_folders_and_more_bytes_than_allowed_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(bytes(11))
    for place in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        with pytest.raises(OSError, match="not a file"):
            open_regular(place)
    with pytest.raises(OSError, match="11 bytes, more than 10"):
        read_regular(tmp_path / "large", 10)
    with pytest.raises(UserError, match="zero: cannot be read"):
        read_lines(tmp_path / "zero")
    with pytest.raises(OSError, match="not a file"), lock(tmp_path / "pipe"):
        pass


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"[]", b"7", b'{"files": 7}', b"\xff"])
def test_whatever_is_wrong_with_a_file_is_one_line_that_names_it(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught, files.reading(path, "fetch it again"):
        [file["name"] for file in read_json(path, "fetch it again")["files"]]
    assert str(caught.value).startswith(f"{path}: is damaged") and str(caught.value).endswith("; fetch it again")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_records_up_to_a_number_of_samples_are_kept_and_half_a_line_is_not(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"samples": 1, "x": 2}\n{"samples": 3}\n{"sam')
    assert [record["samples"] for record in read_lines(path)] == [1, 3]
    keep_up_to(path, 2)
    assert path.read_text() == '{"samples": 1, "x": 2}\n'
    path.write_text('{"samples": 1}\nhalf\n{"samples": 3}\n')
    with pytest.raises(UserError, match=r"records\.jsonl: is damaged.*line 2 is not a JSON object.*; bring back"):
        keep_up_to(path, 2)
    keep_up_to(tmp_path / "none", 2)
    assert read_lines(tmp_path / "none") == [] and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("/proc/x", "/proc/x: cannot be written ("),
        ("{tmp}/" + "n" * 300, "n: cannot be written (File name too long); give another folder"),
        ("{tmp}/" + "long/" * 1000 + "x", "x: cannot be written (File name too long)"),
        ("{tmp}/file/x", "x: cannot be written (Not a directory)"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_line(tmp_path, place, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught, new_folder(Path(place.format(tmp=tmp_path))):
        pass
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "quota")])
def test_a_full_disk_is_a_failed_run(kind):
    message = "x: the disk is full; free some space, or leave"
    with pytest.raises(RunFailed, match=message), files.writing(Path("x"), "leave"):
        raise kind


def hold(path: Path) -> None:
    with lock(path):
        print("ready", flush=True)
        sys.stdin.readline()


def test_a_lock_keeps_another_process_out_until_it_is_left(tmp_path):
    holder = start(hold, tmp_path / "lock")
    assert holder.stdout.readline() == "ready\n"
    with lock(tmp_path / "lock", wait=False) as file:
        assert file is None
    holder.wait()
    with lock(tmp_path / "lock", wait=False) as file:
        assert file is not None


def test_what_nobody_used_for_long_is_removed_and_nothing_else(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    os.utime(tmp_path / "old", (1, 1))
    files.remove_unused(Path(tmp_path).iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
