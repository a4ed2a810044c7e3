from __future__ import annotations

import json

import numpy as np
import pytest

from neuclip.data.named.builtin import builtin_folder, resolve
from neuclip.data.named.catalogue import catalogue
from neuclip.data.named.clip_art import build, pieces
from neuclip.data.named.clip_art.picture import Picture
from neuclip.data.source import open_source
from neuclip.errors import AskedWrongly, RunFailed

STAMPS = "usr/share/tuxpaint/stamps"
CARTOONS = "usr/share/games/pysiogame/res/images/art4apps"


@pytest.fixture
def stamps(put_package, encoded):
    """A package of six stamps, one of them equal to another."""
    files = {f"{STAMPS}/s{number}.png": encoded("PNG", (40, 40), (number, 0, 0)) for number in range(5)}
    files |= {f"{STAMPS}/s{number}.txt": f"Stamp {number}.\n".encode() for number in range(5)}
    copied = {f"{STAMPS}/copy.png": encoded("PNG", (40, 40), (0, 0, 0)), f"{STAMPS}/copy.txt": b"Longer caption.\n"}
    put_package("tuxpaint-stamps-default", files | copied)


def captions(address: str) -> list[str]:
    return sorted(open_source(address).captions())


def test_a_prepared_set_is_read_by_its_name_and_bears_its_notes(stamps):
    folder = builtin_folder("tuxpaint")
    assert captions("tuxpaint") == captions("tuxpaint/test") == [f"Stamp {number}." for number in range(5)]
    notes = json.loads((folder / "BUILD.json").read_text())
    assert notes["pairs"] == {"test": 5} and notes["packages"] == {"tuxpaint-stamps-default": "1.0-1"}
    assert notes["left_out"]["equal to another picture"] == 1
    text = (folder / "README.md").read_text()
    assert "| test | 5 | 5 |" in text and "GPL-2" in text and "tuxpaint-stamps-default 1.0-1" in text
    assert sorted(path.name for path in folder.iterdir()) == ["BUILD.json", "README.md", "test"]


def test_before_it_is_prepared_the_name_leads_to_one_line_that_says_how(put_package):
    with pytest.raises(AskedWrongly, match=r"run: neuclip data prepare pysiogame \(apt-get, 16 MB"):
        resolve("pysiogame")


def test_without_apt_get_and_without_the_file_one_line_says_what_to_do(put_package, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AskedWrongly, match=r"apt-get.*put pysiogame_"):
        builtin_folder("pysiogame")


def test_a_package_without_the_pictures_is_refused(put_package):
    put_package("pysiogame", {"usr/share/doc/pysiogame/copyright": b"GPL"})
    with pytest.raises(RunFailed, match=r"pysiogame 1\.0-1 holds no pictures"):
        builtin_folder("pysiogame")


def test_two_builds_are_equal_to_the_byte(stamps, tmp_path, files_in):
    for folder in ("one", "two"):
        catalogue()["tuxpaint"].build(tmp_path / folder)
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")


def test_a_killed_build_goes_on_and_draws_no_finished_piece_again(stamps, tmp_path, monkeypatch, files_in):
    catalogue()["tuxpaint"].build(tmp_path / "whole")
    monkeypatch.setattr(pieces, "PIECE_ITEMS", 2)
    draw, drawn = pieces.draw_one, []

    def until_the_fourth(file):
        if len(drawn) == 3:
            raise KeyboardInterrupt
        drawn.append(file.name)
        return draw(file)

    monkeypatch.setattr(pieces, "draw_one", until_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        catalogue()["tuxpaint"].build(tmp_path / "killed")
    again: list[str] = []
    monkeypatch.setattr(pieces, "draw_one", lambda file: (again.append(file.name), draw(file))[1])
    catalogue()["tuxpaint"].build(tmp_path / "killed")
    assert (drawn, again) == (["s0.png", "s1.png", "s2.png"], ["s2.png", "s3.png", "s4.png"])
    assert files_in(tmp_path / "killed") == files_in(tmp_path / "whole")


def flipped(content: bytes) -> bytes:
    return content[:300] + bytes([content[300] ^ 1]) + content[301:]


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-9], flipped])
def test_a_damaged_piece_is_drawn_again(stamps, tmp_path, monkeypatch, files_in, damage):
    catalogue()["tuxpaint"].build(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(build, "write_part", None)
        with pytest.raises(TypeError):
            catalogue()["tuxpaint"].build(tmp_path / "stopped")
    [piece] = (tmp_path / "stopped").rglob("*.npz")
    piece.write_bytes(damage(piece.read_bytes()))
    catalogue()["tuxpaint"].build(tmp_path / "stopped")
    assert files_in(tmp_path / "stopped") == files_in(tmp_path / "whole")


def test_a_piece_is_read_as_it_was_written_and_holds_nothing_to_unpickle(tmp_path):
    drawn = [pieces.BLANK, Picture("jpg", b"content", b"digest", (b"grey", b"")), pieces.UNREADABLE]
    pieces.write_piece(tmp_path / "piece.npz", drawn)
    assert list(pieces.read_piece(tmp_path / "piece.npz")) == drawn
    with np.load(tmp_path / "piece.npz", allow_pickle=True) as stored:
        assert {stored[name].dtype for name in stored.files} == {np.dtype(np.uint8)}


def test_cartoons_are_called_by_their_file_and_keep_their_bytes(put_package, encoded):
    files = {
        f"{CARTOONS}/clothes_n_accessories/sun_hat.jpg": encoded("JPEG", (200, 200), "yellow"),
        f"{CARTOONS}/animals/owl.jpg": encoded("JPEG", (200, 200), "brown"),
    }
    put_package("pysiogame", files)
    builtin_folder("pysiogame")
    source = open_source("pysiogame")
    found = {source[number].captions[0]: source[number].image for number in range(len(source))}
    assert found == {"sun hat": files[f"{CARTOONS}/clothes_n_accessories/sun_hat.jpg"], "owl": list(files.values())[1]}
