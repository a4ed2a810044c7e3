"""`neuclip data convert`: the same pairs as shards, written once, never over anything."""

from __future__ import annotations

import json

import pytest

from neuclip.cli.main import main
from tests.builders.data import content, convert, failure, fingerprint, open_source, refusal, several, write, write_tar
from tests.builders.images import image_bytes, photo, write_csv, write_shard


def write_pairs(folder, count: int = 7) -> str:
    """A JSON lines file of PNGs and JPEGs; pairs 2 and 5 have two captions."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        (folder / f"{number}").write_bytes(photo(number) if number % 2 else image_bytes(number))
        captions = [f"caption {number}", "another"] if number % 3 == 2 else f"caption {number}"
        rows.append(json.dumps({"path": f"{number}", "captions": captions}))
    (folder / "pairs.jsonl").write_text("\n".join(rows))
    return str(folder / "pairs.jsonl")


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix == ".tar"}


@pytest.mark.parametrize("shard_size", [1, 3, 7, 100])
def test_shards_hold_the_same_ids_captions_and_bytes(tmp_path, shard_size):
    source = open_source(write_pairs(tmp_path / "pairs"))
    done = convert(source, tmp_path / "shards", shard_size)
    again = open_source(tmp_path / "shards")
    assert content(again) == content(source) and fingerprint(again) == fingerprint(source) and again.faults == ()
    assert (done.samples, done.shards) == (7, -(-7 // shard_size)) == (len(again), len(files(tmp_path / "shards")))
    assert all((tmp_path / "shards" / f"{name}.index.npz").exists() for name in files(tmp_path / "shards"))
    assert {name.rpartition(".")[2] for name in again.where(0).split(": ")[1:]} == {"png"}


def test_a_killed_conversion_goes_on_where_it_was(tmp_path, monkeypatch):
    source = open_source(write_pairs(tmp_path / "pairs"))
    (tmp_path / "pairs" / "1").unlink()
    (tmp_path / "pairs" / "5").unlink()
    convert(source, tmp_path / "whole", 2)
    read = []

    class Killed(BaseException):
        pass

    def reading(self, id):
        read.append(id)
        if id == 5 and read.count(5) == 1:
            raise Killed
        return whole(self, id)

    whole = type(source).__getitem__
    monkeypatch.setattr(type(source), "__getitem__", reading)
    with pytest.raises(Killed):
        convert(source, tmp_path / "parts", 2)
    finished = files(tmp_path / "parts")
    assert [*finished] == ["00000.tar", "00001.tar"]
    assert "unfinished conversion, 2 shards are missing" in refusal(tmp_path / "parts")
    with (tmp_path / "parts" / "skipped.jsonl").open("a") as file:  # as if the kill came just before a shard was moved
        file.write('{"id": 5, "reason": "image file cannot be read", "where": "x"}\n{"id": 6, "re')
    done = convert(source, tmp_path / "parts", 2)
    assert read == [0, 1, 2, 3, 4, 5, 4, 5, 6]
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    listed = [json.loads(line)["id"] for line in (tmp_path / "parts" / "skipped.jsonl").read_text().splitlines()]
    assert listed == [1, 5] and done.samples == 5 and done.skipped == {"image file cannot be read": 2}
    read.clear()
    assert convert(source, tmp_path / "parts", 2) == done and read == []  # a whole one has nothing left to do


@pytest.mark.parametrize("kind", ["folder", "parquet", "packed tar", "karpathy"])
def test_captions_keep_their_fingerprint_with_zeros_blanks_and_several_of_them(tmp_path, kind):
    texts = [["a \0"], ["\0 b", "two"], ["c\0 \0\n", " ", "x\ny"]]
    source = open_source(write(kind, tmp_path / "data", several(texts)))
    convert(source, tmp_path / "shards", 2)
    again = open_source(tmp_path / "shards")
    assert fingerprint(again) == fingerprint(source) and content(again) == content(source)


def test_what_cannot_be_read_is_left_out_and_listed(tmp_path):
    table = write_csv(tmp_path / "table", 6)
    (table.parent / "000002.png").unlink()
    (table.parent / "000004.png").write_bytes(b"")
    convert(open_source(str(table)), tmp_path / "shards", 4)
    again = open_source(tmp_path / "shards")
    assert [again[id].image for id in range(4)] == [image_bytes(number) for number in (0, 1, 3, 5)]
    lines = [json.loads(line) for line in (tmp_path / "shards" / "skipped.jsonl").read_text().splitlines()]
    assert [(line["id"], line["reason"]) for line in lines] == [
        (2, "image file cannot be read"),
        (4, "image is empty"),
    ]
    assert "row 3" in lines[0]["where"]


def test_what_never_was_a_sample_of_the_source_is_listed_and_counted_too(tmp_path):
    lonely = [(f"t{number}.txt", b"alone") for number in range(12)]
    write_tar(tmp_path / "0.tar", [("a.png", image_bytes(0)), ("a.txt", b"a"), *lonely])
    source = open_source(str(tmp_path / "0.tar"))
    for _ in range(2):
        done = convert(source, tmp_path / "shards")
        assert done.samples == 1 and done.skipped == {"no image": 12}
        lines = [json.loads(line) for line in (tmp_path / "shards" / "skipped.jsonl").read_text().splitlines()]
        assert [line["id"] for line in lines] == [-1] * 10 and sum(line["times"] for line in lines) == 12


def test_nothing_is_overwritten(tmp_path):
    source = open_source(write_pairs(tmp_path / "pairs"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "00000.tar").write_bytes(b"precious")
    (tmp_path / "file").write_bytes(b"precious")
    for place in ("mine", "file"):
        assert "nothing is overwritten" in refusal(lambda place=place: convert(source, tmp_path / place))
    assert (tmp_path / "mine" / "00000.tar").read_bytes() == (tmp_path / "file").read_bytes() == b"precious"
    convert(source, tmp_path / "shards", 3)
    before = files(tmp_path / "shards")
    for other, size in ((source, 4), (open_source(write_pairs(tmp_path / "more", 8)), 3)):
        message = refusal(lambda other=other, size=size: convert(other, tmp_path / "shards", size))
        assert "other data or another --shard-size" in message
    assert files(tmp_path / "shards") == before


def test_a_data_set_without_a_readable_sample_fails_with_the_reason(tmp_path):
    table = write_csv(tmp_path / "table", 3)
    for number in range(3):
        (table.parent / f"{number:06d}.png").unlink()
    message = failure(lambda: convert(open_source(table), tmp_path / "shards"))
    assert "none of 3 samples" in message and "image file cannot be read (3)" in message


def test_the_command_converts_and_says_what_it_did(tmp_path, capsys):
    table = write_csv(tmp_path / "table", 5)
    (table.parent / "000002.png").unlink()
    arguments = [
        "data",
        "convert",
        str(table),
        str(tmp_path / "out"),
        "--shard-size",
        "2",
        "--data.caption_column",
        "title",
    ]
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert output.out == f"{tmp_path / 'out'}\n"
    assert "4 samples in 3 shards; left out 1" in output.err and "image file cannot be read (1)" in output.err


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    shard = write_shard(tmp_path / "set" / "0.tar", range(2))
    (tmp_path / "link").symlink_to(tmp_path / "set")
    wrong = [
        (["convert", str(shard)], "give neuclip data convert SOURCE FOLDER"),
        (["convert", str(tmp_path / "set"), str(tmp_path / "set" / "out")], "lies inside of"),
        (["convert", str(tmp_path / "set"), str(tmp_path / "x" / ".." / "link" / "out")], "lies inside of"),
        (["convert", f"{shard}:2,{tmp_path / 'set'}", str(tmp_path / "set" / "out")], "lies inside of"),
        (["convert", str(shard), str(tmp_path / "out"), "--shard-size", "0"], "at least one sample"),
        (["convert", str(tmp_path / "none"), str(tmp_path / "out")], "no such file or folder"),
    ]
    for arguments, message in wrong:
        assert main(["data", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "set" / "out").exists()
