"""An address means exactly the files it says, or is refused in one line that says what to write."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import fsspec
import pytest

from neuclip.errors import RunFailed, UserError
from tests.builders.data import (
    data_name,
    image_bytes,
    open_source,
    order_of,
    outcomes,
    pair,
    parts,
    refusal,
    write_shards,
    write_tar,
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def shards(*names: str) -> None:
    """One pair each; the caption tells which."""
    for number, name in enumerate(names):
        write_tar(Path(name), pair(number))


def captions(address: str) -> list[int]:
    return [int(caption.removeprefix("image ")) for caption in outcomes(open_source(address))]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("s/{08..11}.tar", "s/08.tar s/09.tar s/10.tar s/11.tar"),
        ("{a,b}/{0..1}.tar", "a/0.tar a/1.tar b/0.tar b/1.tar"),
        ("{098..100}.tar", "098.tar 099.tar 100.tar"),
        ("{8..010}.tar", "008.tar 009.tar 010.tar"),
        ("{a..c}.tar", "a.tar b.tar c.tar"),
        ("{0..4..2}.tar", "0.tar 2.tar 4.tar"),
        ("{3..0}.tar", "0.tar 1.tar 2.tar 3.tar"),  # files are sorted by path, whatever the pattern counts
        ("?.tar", "0.tar 1.tar"),
        ("{a,b{1,2}}.tar", "a.tar b1.tar b2.tar"),
        ("x{,y}.tar", "x.tar xy.tar"),
        ("{a.tar", "{a.tar"),
        ("{a}.tar", "{a}.tar"),
        ("a}b{.tar", "a}b{.tar"),
        ("deep/**/*.tar", "deep/0.tar deep/a/1.tar deep/a/b/2.tar"),
        ("{g,sh}/*.tar", "g/0.tar g/1.tar sh/0.tar"),
    ],
)
def test_patterns_mean_what_bash_means_and_no_other_files(pattern, names):
    shards(*names.split(), "other/9.tar")
    assert captions(pattern) == list(range(len(names.split())))


def test_a_range_of_too_many_names_is_refused_before_it_is_expanded(monkeypatch):
    assert "more than 1,000,000 files" in refusal("{0..99999999999}.tar")
    monkeypatch.setattr("neuclip.data.locations.MOST_NAMES", 100)
    for pattern in ("{a..z}" * 6, "{0..10}{0..10}", "{1..101}"):
        assert "more than 100 files" in refusal(pattern)
    assert "100 of 100" in refusal("{1..100}.tar")


def test_weights_are_split_from_addresses_and_a_path_that_exists_is_never_cut():
    shards("sh/0.tar", "sh/1.tar", "odd:2/0.tar", "b{1,2}.tar", "odd/a,b.tar")
    for address, size in (
        ("sh", 2), ("sh:3", 6), ("sh/0.tar:2, sh/{0,1}.tar:3,b{1,2}.tar", 9), ("odd:2", 1), ("odd:2:2", 2),
        ("odd/a,b.tar", 1), ("{sh/0,sh/1}.tar,odd:2", 3),
    ):  # fmt: skip
        assert order_of(open_source(address), 0).size == size, address
    for wrong in ("sh,,odd:2", "sh:0", "sh:-1", "sh:1e2,odd:2", ",", " "):
        refusal(wrong)
    assert "a weight is " in refusal("sh:-1") and "give sh:2" in refusal("sh:1e2,odd:2")


def test_a_fractional_weight_and_a_source_named_twice_are_answered_with_what_to_write():
    shards("sh/0.tar", "more/0.tar")
    message = refusal("sh:0.5,more")
    assert "sh:0.5: a weight is a whole number above 0" in message and "more weight" in message
    for address in ("sh,sh", "sh:2,more,sh"):
        assert "sh: is named " in refusal(address) and "name it once, with a weight: sh:2" in refusal(address)


def test_a_port_is_no_weight(server):
    write_shards(server.folder, [1, 2])
    address = f"{server.url}/{{00000..00001}}.tar"
    assert order_of(open_source(address), 0).size == 3 and order_of(open_source(f"{address}:2"), 0).size == 6
    for address in ("http://[::1]:9/x.tar:2", "http://[::1]:9"):  # the number behind the host is no weight
        with pytest.raises((UserError, RunFailed), match=r"^http://\[::1\]:9"):
            open_source(address, tries=1)


def test_an_address_longer_than_a_file_name_is_read_part_by_part():
    names = [f"{'n' * 40}{number}" for number in range(9)]
    shards(*(f"{name}.tar" for name in names))
    assert captions(",".join(f"{name}.tar" for name in names)) == list(range(9))
    assert captions(f"{{{','.join(names)}}}.tar") == list(range(9))
    for address in ("x" * 5000, "x" * 300 + ".csv", "x" * 300 + ":2", "{" + "x" * 300 + ",y}.tar"):
        refusal(address)


def test_ids_follow_sorted_shard_paths_one_level_deep():
    shards("d/a/0.tar", "d/a/1.tar", "d/b.tar", "d/a/b/too-deep.tar")
    assert captions("d") == [0, 1, 2]


@pytest.mark.parametrize(
    ("names", "held_out", "proposal"),
    [
        (["train/00000.tar", "test/00000.tar"], "test", "spl/train"),
        (["train-0.tar", "train-1.tar", "val-0.tar"], "val", "spl/train*.tar"),
        (["cc3m-train-0000.tar", "cc3m-validation-0000.tar"], "validation", "spl/cc3m-train"),
        (["00000.tar", "test/00000.tar"], "test", ""),
        (["train.parquet", "test.parquet"], "test", "spl/train"),
        (["train/0.parquet", "held-out/0.parquet"], "held-out", "spl/train"),
        (["a-00000-of-00002.parquet", "b-00000-of-00001.parquet"], "b", "spl/"),
        (["train.csv", "dev.csv"], "dev", "spl/train"),
        (["train2017/a.jpg", "val2017/b.jpg"], "val2017", "spl/train2017"),
        (["a.jpg", "test/b.jpg"], "test", ""),
        (["bus/a.jpg", "validation/b.jpg"], "validation", ""),
    ],
)
def test_a_folder_of_training_and_test_is_never_read_as_one(names, held_out, proposal):
    shards(*(f"spl/{name}" for name in names))
    message = refusal("spl")
    assert message.startswith("spl: holds the part") and held_out in message and proposal in message
    if names[-1].endswith(".tar"):
        assert "holds the part" in refusal(f"file://{Path('spl').absolute()}")


def test_captions_that_lie_elsewhere_are_proposed():
    shards("coco/annotations/captions_val2017.json", "coco/val2017/a.jpg", "excel/a.jpg", "excel/Sheet1.csv")
    assert "such as coco/annotations/captions_val2017.json" in refusal("coco")
    assert "did you mean" in refusal("coco/val2017") and "captions_val2017.json?" in refusal("coco/val2017")
    assert "did you mean excel/Sheet1.csv?" in refusal("excel")


def test_parts_that_are_all_training_or_not_called_so_are_one_set():
    shards("a/train/0.tar", "a/more/0.tar", "b/latest.tar", "b/contest-1.tar", "c/test/0.tar")
    assert [sorted(captions(folder)) for folder in "abc"] == [[0, 1], [2, 3], [4]]
    for name in ("train", "bus"):
        Path(f"d/{name}").mkdir(parents=True)
        Path(f"d/{name}/0.png").write_bytes(image_bytes(0))
        Path(f"d/{name}/0.txt").write_text("a class of vehicles")
    assert len(open_source("d")) == 2


def test_the_held_out_parts_of_a_drawn_set_are_not_read_as_training_data():
    for name in ("train", "new-drawings"):
        write_shards(Path("icons") / name, [2])
    assert "holds the parts new-drawings, train; give one of them, such as icons/train" in refusal("icons")


def test_a_remote_folder_of_training_and_test_is_never_read_as_one():
    memory = fsspec.filesystem("memory")
    for name in ("train/0.tar", "test/0.tar"):
        memory.pipe_file(f"/parts/{name}", b"x")
    assert "holds the parts test, train; give one of them, such as memory://parts/train" in refusal("memory://parts/")
    memory.rm("/parts", recursive=True)


@pytest.mark.parametrize("address", ["sh", "sh/*", "sh/*.tar", "sh/1.tar", "sh/{0,1}.tar", "sh/1.tar,sh"])
def test_a_link_to_a_shard_that_is_gone_is_an_error_and_no_smaller_set(address):
    shards("sh/0.tar")
    Path("sh/1.tar").symlink_to("/nowhere/1.tar")
    assert "sh/1.tar" in refusal(address)
    for whole in ("sh", "sh/*"):
        assert refusal(whole).startswith("sh/1.tar: is a link to /nowhere/1.tar, which is gone; bring that back")


def test_what_is_gone_is_not_proposed():
    shards("sh/00000.tar")
    Path("sh/00021.tar").symlink_to("/nowhere/1.tar")
    assert "did you mean sh/00000.tar" in refusal("sh/00022.tar")


@pytest.mark.parametrize(
    ("address", "name"),
    [("deep/**/*.tar", "deep"), ("deep", "deep"), ("deep/0.tar", "0"), ("deep/0.tar:2,deep/a", "0+a")],
)
def test_the_name_of_data_is_known_before_they_are_opened(address, name):
    shards("deep/0.tar", "deep/a/1.tar")
    assert data_name(address) == open_source(address).name == name


def test_a_star_means_the_shards_again_after_they_were_indexed():
    shards("sh/00000.tar", "sh/00001.tar")
    for name in ("00000.parquet", "00000_stats.json", ".hidden.tar"):  # img2dataset's, and an editor's
        Path("sh", name).write_bytes(b"x")
    Path("sh/00001.tar.gz").write_bytes(gzip.compress(Path("sh/00001.tar").read_bytes()))
    for _ in range(2):
        assert captions("sh/*") == [0, 1]
    assert Path("sh/00000.tar.index.npz").exists()


@pytest.mark.parametrize("twin", ["0.tgz", "0.tar.gz", "0.TGZ"])
def test_a_packed_twin_beside_its_shard_shows_no_sample_twice(twin):
    shards("sh/0.tar", "sh/1.tar")
    for name in (twin, "2.tgz"):
        Path("sh", name).write_bytes(gzip.compress(Path("sh/0.tar").read_bytes()))
    assert captions("sh") == captions("sh/*") == [0, 1, 0]


def test_each_part_of_a_pattern_must_match():
    shards("g/0.tar")
    assert "1 of 2 " in refusal("{g,no}/*.tar") and "first of all no/*.tar" in refusal("{g,no}/*.tar")


def test_a_pattern_of_folders_is_refused_and_the_folders_proposed():
    shards("g/0.tar", "sh/0.tar", "sh/1.tar")
    assert "names folders; give g,sh" in refusal("{g,sh}") and "give g,sh" in refusal("*")
    assert captions("g,sh") == [0, 1, 2]


def test_a_list_of_shards_is_one_source_in_its_order():
    shards("data/0.tar", "data/1.tar", "data/2.tar", "data/more/3.tar", "else/0.tar")
    Path("data/shards.txt").write_bytes(b"\xef\xbb\xbf# mine\r\n\r\n2.tar\r\n{0..1}.tar\r\nmore\r\n")
    assert captions("data/shards.txt") == captions("data/*.txt") == [2, 0, 1, 3]
    source = open_source("data/shards.txt:2,else/0.tar")
    assert [len(part) for part in parts(source)] == [4, 1] and source.name == "shards+0"


def test_a_list_of_remote_shards_is_one_source_in_its_order(server):
    write_shards(server.folder, [1, 1, 1])
    Path("shards.txt").write_text(f"{server.url}/00002.tar\n{server.url}/{{00000..00001}}.tar\n")
    assert captions("shards.txt") == [2, 0, 1]
    Path("shards.txt").write_text(f"{server.url}/00002.tar?key=1\n" * 2)
    assert f"lists {server.url}/00002.tar 2 times" in refusal("shards.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.tar\n7.tar\n", "7.tar: no such file"),
        ("0.tar\n\nnotes.md\n", "notes.md"),
        ("*.tar\n0.tar\n", "0.tar"),
        ("0.tar\ns3://bucket/0.tar\n", "lists local and remote shards; make two lists"),
        ("0.tar\nicons-30k\n", "icons-30k"),
        ("# nothing\n", "shards.txt: lists no shards; give one address per line"),
        ("\udcff", "UTF-8"),
    ],
)
def test_a_wrong_list_of_shards_is_refused_with_what_is_wrong_in_it(text, message):
    shards("0.tar", "notes.md")
    Path("shards.txt").write_text(text, errors="surrogateescape")
    assert message in refusal("shards.txt") and "shards.txt" in refusal("shards.txt")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("a.tar::b.tar", "give a.tar,b.tar"),
        ("s3://x/a.tar::s3://x/b.tar", "give s3://x/a.tar,s3://x/b.tar"),
        ("pipe:aws s3 cp s3://x/{0..9}.tar -", "commands are not run; give the address itself"),
        ("x.tar.bz2", "unpack it, or make a .tar or .tar.gz"),
        ("x.tar.xz", "unpack it, or make a .tar or .tar.gz"),
        ("x.zip", "unpack it, or make a .tar or .tar.gz"),
        ("http://127.0.0.1:9/pairs.csv", "only tar shards can be remote; fetch it and give the local file"),
        ("s3://x/{0..3}.parquet", "only tar shards can be remote; fetch it and give the local file"),
        ("sh/{a,b", "sh/{a,b: no such file or folder; a pattern has closed braces"),
    ],
)
def test_forms_of_webdataset_are_refused_with_what_to_write_instead(address, message):
    shards("sh/0.tar", "x.tar.bz2", "x.tar.xz", "x.zip")
    assert message in refusal(address)


@pytest.mark.parametrize(
    "address",
    [
        "memory://nothing/?token=SECRET",
        "memory://no/{0..99999999}.tar?token=SECRET",
        "memory://parts/?token=SECRET",
        "memory://parts/train/0.tar?token=SECRET",
        "memory://no/{a,b}.tar?token=SECRET,,sh",
        "memory://no/x.tar?token=SECRET:-1",
        "memory://no/x.tar?token=SECRET::memory://no/y.tar?token=SECRET",
        "pipe:curl memory://no/x.tar?token=SECRET",
        "memory://no/x.csv?token=SECRET",
        "nowhere://no/x.tar?token=SECRET",
    ],
)
def test_no_refusal_shows_the_query_of_an_address(address, monkeypatch):
    memory = fsspec.filesystem("memory")
    # A remote that takes queries, as web servers do.
    monkeypatch.setattr(type(memory), "_strip_protocol", classmethod(without_query_of(type(memory)._strip_protocol)))
    for name in ("train/0.tar", "test/0.tar"):
        memory.pipe_file(f"/parts/{name}", bytes(10240))
    assert "SECRET" not in refusal(address)
    memory.rm("/parts", recursive=True)


def without_query_of(strip):
    return lambda _, path: strip(path.partition("?")[0])


def test_a_saved_data_set_of_several_splits_is_refused_in_the_same_words():
    Path("saved").mkdir()
    Path("saved/dataset_dict.json").write_text(json.dumps({"splits": ["test", "train"]}))
    assert "saved: holds the parts test, train; give one of them, such as saved/train" in refusal("saved")
