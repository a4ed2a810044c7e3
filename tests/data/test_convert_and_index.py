"""`neuclip data convert` and `neuclip data index`: the same pairs as shards, written once, never over anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuclip.cli.main import main
from neuclip.data.convert import convert
from neuclip.data.source import Source
from tests.builders.data import pair, several, write, write_files, write_shards, write_tar
from tests.builders.images import image_bytes, photo, write_csv
from tests.builders.reading import content, failure, fingerprint, open_source, refusal


def write_pairs(folder: Path, count: int = 7) -> str:
    """A JSON lines file of PNGs and JPEGs; pairs 2 and 5 have two captions."""
    rows = []
    for number in range(count):
        captions = [f"caption {number}", "another"] if number % 3 == 2 else f"caption {number}"
        rows.append(json.dumps({"path": f"{number}", "captions": captions}))
        write_files(folder, {f"{number}": photo(number) if number % 2 else image_bytes(number)})
    return str(write_files(folder, {"pairs.jsonl": "\n".join(rows)}) / "pairs.jsonl")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix == ".tar"}


def skipped(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("shard_size", [1, 3, 7, 100])
def test_shards_hold_the_same_ids_captions_and_bytes(tmp_path, shard_size):
    source = open_source(write_pairs(tmp_path / "pairs"))
    done = convert(source, tmp_path / "shards", shard_size)
    again = open_source(tmp_path / "shards")
    assert content(again) == content(source) and fingerprint(again) == fingerprint(source) and again.faults == ()
    assert (done.samples, done.shards) == (7, -(-7 // shard_size)) == (len(again), len(files(tmp_path / "shards")))
    assert all((tmp_path / "shards" / f"{name}.index.npz").exists() for name in files(tmp_path / "shards"))
    assert again.where(0).endswith(".png") and again.where(1).endswith(".jpg")


@pytest.mark.parametrize("kind", ["folder", "parquet", "packed tar", "karpathy"])
def test_captions_keep_their_fingerprint_with_zeros_blanks_and_several_of_them(tmp_path, kind):
    texts = [["a \0"], ["\0 b", "two"], ["c\0 \0\n", " ", "x\ny"]]
    source = open_source(write(kind, tmp_path / "data", several(texts)))
    convert(source, tmp_path / "shards", 2)
    again = open_source(tmp_path / "shards")
    assert fingerprint(again) == fingerprint(source) and content(again) == content(source)


class Killed(BaseException):
    pass


class KilledOnce(Source):
    """A source whose process is killed when sample 5 is read for the first time."""

    def __init__(self, source: Source):
        self.name, self.kind, self.source, self.read = source.name, source.kind, source, list[int]()

    def __len__(self):
        return len(self.source)

    def where(self, id):
        return self.source.where(id)

    def caption_facts(self):
        return self.source.caption_facts()

    def __getitem__(self, id):
        self.read.append(id)
        if self.read.count(5) == 1 and id == 5:
            raise Killed
        return self.source[id]


def test_a_killed_conversion_goes_on_where_it_was(tmp_path):
    whole = open_source(write_pairs(tmp_path / "pairs"))
    for lost in "15":
        (tmp_path / "pairs" / lost).unlink()
    convert(whole, tmp_path / "whole", 2)
    source, parts = KilledOnce(whole), tmp_path / "parts"
    with pytest.raises(Killed):
        convert(source, parts, 2)
    assert [*files(parts)] == ["00000.tar", "00001.tar"]
    assert "unfinished conversion, 2 shards are missing" in refusal(parts)
    with (parts / "skipped.jsonl").open("a") as file:  # as if the kill came just before a shard was moved
        file.write('{"id": 5, "reason": "image file cannot be read", "where": "x"}\n{"id": 6, "re')
    done = convert(source, parts, 2)
    assert source.read == [0, 1, 2, 3, 4, 5, 4, 5, 6]
    assert files(parts) == files(tmp_path / "whole")
    assert [line["id"] for line in skipped(parts)] == [1, 5]
    assert done.samples == 5 and done.skipped == {"image file cannot be read": 2}
    source.read.clear()
    assert convert(source, parts, 2) == done and source.read == []  # a whole one has nothing left to do


def test_what_cannot_be_read_is_left_out_and_listed(tmp_path):
    table = write_csv(tmp_path / "table", 6)
    (table.parent / "000002.png").unlink()
    (table.parent / "000004.png").write_bytes(b"")
    convert(open_source(table), tmp_path / "shards", 4)
    again = open_source(tmp_path / "shards")
    assert [again[id].image for id in range(4)] == [image_bytes(number) for number in (0, 1, 3, 5)]
    lines = skipped(tmp_path / "shards")
    reasons = {line["id"]: line["reason"] for line in lines}
    assert reasons == {2: "image file cannot be read", 4: "image is empty"} and "row 3" in lines[0]["where"]


def test_what_never_was_a_sample_of_the_source_is_listed_and_counted_too(tmp_path):
    lonely = [(f"t{number}.txt", b"alone") for number in range(12)]
    source = open_source(write_tar(tmp_path / "0.tar", [*pair(0), *lonely]))
    for _ in range(2):
        done = convert(source, tmp_path / "shards")
        assert done.samples == 1 and done.skipped == {"no image": 12}
        lines = skipped(tmp_path / "shards")
        assert [line["id"] for line in lines] == [-1] * 10 and sum(line["times"] for line in lines) == 12


def test_nothing_is_overwritten(tmp_path):
    source = open_source(write_pairs(tmp_path / "pairs"))
    write_files(tmp_path, {"mine/00000.tar": b"precious", "file": b"precious"})
    for place in ("mine", "file"):
        assert "nothing is overwritten" in refusal(lambda place=place: convert(source, tmp_path / place))
    assert (tmp_path / "mine" / "00000.tar").read_bytes() == (tmp_path / "file").read_bytes() == b"precious"
    convert(source, tmp_path / "shards", 3)
    before = files(tmp_path / "shards")
    for other, size in ((source, 4), (open_source(write_pairs(tmp_path / "more", 8)), 3)):
        message = refusal(lambda other=other, size=size: convert(other, tmp_path / "shards", size))
        assert "other data or of another --shard-size" in message
    assert files(tmp_path / "shards") == before


def test_a_data_set_without_a_readable_sample_fails_with_the_reason(tmp_path):
    table = write_csv(tmp_path / "table", 3)
    for image in table.parent.glob("*.png"):
        image.unlink()
    message = failure(lambda: convert(open_source(table), tmp_path / "shards"))
    assert "none of 3 samples" in message and "image file cannot be read (3)" in message


def test_the_command_converts_and_says_what_it_did(tmp_path, capsys):
    table = write_csv(tmp_path / "table", 5)
    (table.parent / "000002.png").unlink()
    flags = ["--shard-size", "2", "--data.caption_column", "title"]
    assert main(["data", "convert", str(table), str(tmp_path / "out"), *flags]) == 0
    output = capsys.readouterr()
    assert output.out == f"{tmp_path / 'out'}\n"
    assert "4 samples in 3 shards; skipped 1" in output.err and "image file cannot be read (1)" in output.err


def test_the_command_indexes_and_tells_what_it_found(tmp_path, capsys):
    folder = write_shards(tmp_path / "shards", [2, 3])
    write_tar(folder / "00002.tar", [*pair(9), ("x.txt", b"lonely")])
    assert main(["data", "index", str(folder)]) == 0
    said = capsys.readouterr().out
    assert all(words in said for words in ("shards: 6 samples", "in 3 shards", str(folder), "no image"))
    assert "without" not in said and (folder / "00002.tar.index.npz").exists()
    assert main(["data", "index", str(folder), "--data.caption_key", "nope"]) == 0
    said = capsys.readouterr().out
    assert "6 samples" in said and "without" in said


def test_the_commands_refuse_in_one_line(tmp_path, capsys):
    shards = write_shards(tmp_path / "set", [2])
    (tmp_path / "link").symlink_to(shards)
    shard, out, inside = f"{shards}/00000.tar", str(tmp_path / "out"), str(shards / "out")
    for arguments, message in (
        (["convert", shard], "usage: neuclip data convert SOURCE FOLDER"),
        (["convert", str(shards), inside], "is inside "),
        (["convert", str(shards), f"{tmp_path}/x/../link/out"], "is inside "),
        (["convert", f"{shard}:2,{shards}", inside], "is inside "),
        (["convert", shard, out, "--shard-size", "0"], "at least one sample"),
        (["convert", str(tmp_path / "none"), out], "no such file or folder"),
        (["index", write("folder", tmp_path / "photos", several([["a"]]))], "contains no tar shards"),
    ):
        assert main(["data", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not Path(out).exists() and not Path(inside).exists()
