"""Files are read, written and locked so that nothing that lies there can harm or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from neuclip.errors import UserError
from neuclip.files import lock, new_file, open_regular, read_regular, reading, remove_unused, write_json, write_text
from neuclip.records import read_lines


def test_a_file_is_replaced_in_one_move_and_an_error_leaves_the_old_one_alone(tmp_path):
    place = tmp_path / "deep" / "x.txt"
    write_text(place, "old")
    with pytest.raises(KeyError), new_file(place) as file:
        file.write(b"half")
        raise KeyError
    assert place.read_text() == "old" and [path.name for path in place.parent.iterdir()] == ["x.txt"]
    write_json(place, {"a": 1})
    assert json.loads(place.read_text()) == {"a": 1}


def test_links_that_lie_there_are_replaced_and_never_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("x.txt", "x.txt.partial", ".x.txt.part"):
        (tmp_path / name).symlink_to(victim)
    write_text(tmp_path / "x.txt", "new")
    assert victim.read_text() == "mine" and (tmp_path / "x.txt").read_text() == "new"
    (tmp_path / "run.lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), lock(tmp_path / "run.lock"):
        pass
    assert victim.read_text() == "mine"


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
    with pytest.raises(OSError, match="not a file"):
        read_lines(tmp_path / "zero")


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"[]", b"7", b'{"files": 7}', b"\xff"])
def test_whatever_is_wrong_with_a_file_is_one_line_that_names_it(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught, reading(path, "fetch it again"):
        [file["name"] for file in json.loads(read_regular(path))["files"]]
    assert str(caught.value).startswith(f"{path}: is damaged") and str(caught.value).endswith("; fetch it again")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_lock_keeps_another_process_out_until_it_is_left(tmp_path):
    script = "import sys; from pathlib import Path; from neuclip.files import lock\n"
    script += "with lock(Path(sys.argv[1]), wait=False) as file: print(file is not None)"

    def free() -> bool:
        return (
            subprocess.run([sys.executable, "-c", script, tmp_path / "lock"], capture_output=True).stdout == b"True\n"
        )

    with lock(tmp_path / "lock"):
        assert not free()
    assert free()


def test_what_nobody_used_for_long_is_removed_and_nothing_else(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    os.utime(tmp_path / "old", (1, 1))
    remove_unused(Path(tmp_path).iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
