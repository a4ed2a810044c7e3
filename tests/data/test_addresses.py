"""An address means exactly the files it says, or is refused in one line that says what to write."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from neuclip.data.mixture import order_of
from neuclip.data.open import data_name
from neuclip.errors import RunFailed, UserError
from tests.builders.data import pair, write_files, write_shards, write_tar
from tests.builders.reading import open_source, outcomes, refusal


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def memory(monkeypatch):
    """A remote that takes queries, as web servers do."""
    system = fsspec.filesystem("memory")
    strip = type(system)._strip_protocol
    without_query = classmethod(lambda _, path: strip(path.partition("?")[0]))
    monkeypatch.setattr(type(system), "_strip_protocol", without_query)
    yield system
    system.store.clear()


def shards(*names: str) -> None:
    """One pair each; the caption tells which."""
    for number, name in enumerate(names):
        write_tar(Path(name), pair(number))


def numbers(address: str) -> list[int]:
    return [int(caption.removeprefix("image ")) for caption in outcomes(open_source(address))]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("s/{08..11}.tar", "s/08.tar s/09.tar s/10.tar s/11.tar"),
        ("{a,b}/{0..1}.tar", "a/0.tar a/1.tar b/0.tar b/1.tar"),
        ("{8..010}.tar", "008.tar 009.tar 010.tar"),
        ("{a..c}.tar", "a.tar b.tar c.tar"),
        ("{0..4..2}.tar", "0.tar 2.tar 4.tar"),
        ("{3..0}.tar", "0.tar 1.tar 2.tar 3.tar"),  # files are sorted by path, whatever the pattern counts
        ("?.tar", "0.tar 1.tar"),
        ("{a,b{1,2}}.tar", "a.tar b1.tar b2.tar"),
        ("x{,y}.tar", "x.tar xy.tar"),
        ("{a.tar", "{a.tar"),
        ("a}b{.tar", "a}b{.tar"),
        ("deep/**/*.tar", "deep/0.tar deep/a/1.tar deep/a/b/2.tar"),
        ("{g,sh}/*.tar", "g/0.tar g/1.tar sh/0.tar"),
        ("odd/a,b.tar", "odd/a,b.tar"),  # a path that exists is never cut
        ("d", "d/a/0.tar d/a/1.tar d/b.tar"),  # a folder: one level deep, by path
        ("g,sh", "g/0.tar sh/0.tar sh/1.tar"),
    ],
)
def test_patterns_mean_what_bash_means_and_no_other_files(pattern, names):
    shards(*names.split(), "other/9.tar", "d/a/too/deep.tar")
    assert numbers(pattern) == list(range(len(names.split())))


def test_a_range_of_too_many_names_is_refused_before_it_is_expanded(monkeypatch):
    assert "more than 1,000,000 files" in refusal("{0..99999999999}.tar")
    monkeypatch.setattr("neuclip.data.locations.MOST_NAMES", 100)
    for pattern in ("{a..z}" * 6, "{0..10}{0..10}", "{1..101}"):
        assert "more than 100 files" in refusal(pattern)
    assert "100 of 100" in refusal("{1..100}.tar")


@pytest.mark.parametrize(
    ("address", "size"),
    [("sh", 2), ("sh:3", 6), ("sh/0.tar:2, sh/{0,1}.tar:3,b{1,2}.tar", 9), ("odd:2", 1), ("odd:2:2", 2),
     ("{sh/0,sh/1}.tar,odd:2", 3)],
)  # fmt: skip
def test_a_number_behind_an_address_is_its_weight_unless_a_file_is_called_so(address, size):
    shards("sh/0.tar", "sh/1.tar", "odd:2/0.tar", "b{1,2}.tar")
    assert order_of(open_source(address), 0).size == size


def test_a_port_is_no_weight(server):
    write_shards(server.folder, [1, 2])
    address = f"{server.url}/{{00000..00001}}.tar"
    assert order_of(open_source(address), 0).size == 3 and order_of(open_source(f"{address}:2"), 0).size == 6
    for address in ("http://[::1]:9/x.tar:2", "http://[::1]:9"):  # nor are colons in a host a chain
        with pytest.raises((UserError, RunFailed), match=r"^http://\[::1\]:9"):
            open_source(address, tries=1)


def test_an_address_longer_than_a_file_name_is_read_part_by_part():
    names = [f"{'n' * 40}{number}" for number in range(9)]
    shards(*(f"{name}.tar" for name in names))
    assert numbers(",".join(f"{name}.tar" for name in names)) == list(range(9))
    assert numbers(f"{{{','.join(names)}}}.tar") == list(range(9))
    for address in ("x" * 5000, "x" * 300 + ".csv", "x" * 300 + ":2", "{" + "x" * 300 + ",y}.tar"):
        refusal(address)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "no data given"),
        (" ", "--data.train"),
        ("sh,,more", "a comma with no data path"),
        ("sh:0", "the weight must be a whole number above 0"),
        ("sh:-1", "the weight must be "),
        ("sh:1e2,more", "give sh:2"),
        ("sh:0.5,more", "give the other data more weight"),
        ("sh,sh", "sh: is given 2 times; give it once, with a weight: sh:2"),
        ("sh:2,more,sh", "give it once, with a weight: sh:2"),
        ("missing", "no such file or folder"),
        ("icon-30k", "did you mean icons-30k"),
        ("icon-30k/new-drawings", "did you mean icons-30k/new-drawings"),
        ("sh/00022.tar", "did you mean sh/00020.tar"),  # and not sh/00021.tar, a broken link
        *((address, "sh/00021.tar: is a link to /nowhere/1.tar, which does not exist; restore that file")
          for address in ("sh/00021.tar", "sh", "sh/*", "sh/0.tar,sh")),  # an error, not a smaller set
        ("sh/{0,00021}.tar", "sh/00021.tar"),
        ("coco", "such as coco/annotations/captions_val2017.json"),
        ("coco/val2017", "coco/annotations/captions_val2017.json?"),
        ("excel", "did you mean excel/Sheet1.csv?"),
        ("notes.md", "unknown kind"),
        ("{a.csv,a.jsonl}", "another kind"),
        ("*.csv", "separate them with commas: a.csv,b.csv"),
        ("{0..1}.tar", "2 of 2"),
        ("*.tab", "no file matches"),
        ("{more,no}/*.tar", "1 of 2 patterns match no file, the first is no/*.tar"),
        ("{more,sh}", "matches folders; give more,sh"),
        ("sh/{a,b", "sh/{a,b: no such file or folder; a pattern needs closed braces"),
        ("a.tar::b.tar", "give a.tar,b.tar"),  # from here on: forms of webdataset, and packed files
        ("s3://x/a.tar::s3://x/b.tar", "give s3://x/a.tar,s3://x/b.tar"),
        ("pipe:aws s3 cp s3://x/{0..9}.tar -", "commands are not run; give only the path or URL"),
        ("x.tar.bz2", "unpack it, or make a .tar or .tar.gz"),
        ("x.zip", "unpack it, or make a .tar or .tar.gz"),
        ("http://127.0.0.1:9/pairs.csv", "only tar shards can be remote; fetch it and give the local file"),
        ("s3://x/{0..3}.parquet", "only tar shards can be remote; fetch it and give the local file"),
    ],
)  # fmt: skip
def test_a_wrong_address_is_answered_with_what_to_write(address, words):
    shards("sh/0.tar", "sh/00020.tar", "more/0.tar", "x.tar.bz2", "x.zip", "notes.md", "a.csv", "b.csv", "a.jsonl")
    shards("coco/annotations/captions_val2017.json", "coco/val2017/a.jpg", "excel/a.jpg", "excel/Sheet1.csv")
    Path("sh/00021.tar").symlink_to("/nowhere/1.tar")
    assert words in refusal(address)


@pytest.mark.parametrize(
    ("names", "held_out", "proposal"),
    [
        ("train/00000.tar test/00000.tar", "test", "spl/train"),
        ("train-0.tar train-1.tar val-0.tar", "val", "spl/train*.tar"),
        ("cc3m-train-0000.tar cc3m-validation-0000.tar", "validation", "spl/cc3m-train"),
        ("00000.tar test/00000.tar", "test", ""),
        ("train/0.tar new-drawings/0.tar", "new-drawings", "spl/train"),
        ("train/0.parquet held-out/0.parquet", "held-out", "spl/train"),
        ("a-00000-of-00002.parquet b-00000-of-00001.parquet", "b", "spl/"),
        ("train.csv dev.csv", "dev", "spl/train"),
        ("train2017/a.jpg val2017/b.jpg", "val2017", "spl/train2017"),
        ("a.jpg test/b.jpg", "test", ""),
        ("bus/a.jpg validation/b.jpg", "validation", ""),
    ],
)
def test_a_folder_of_training_and_test_is_never_read_as_one(names, held_out, proposal):
    shards(*(f"spl/{name}" for name in names.split()))
    message = refusal("spl")
    assert message.startswith("spl: holds the part") and held_out in message and proposal in message
    if names.endswith(".tar"):
        assert "holds the part" in refusal(f"file://{Path('spl').absolute()}")


def test_parts_that_are_all_training_or_not_called_so_are_one_set():
    shards("a/train/0.tar", "a/more/0.tar", "b/latest.tar", "b/contest-1.tar", "c/test/0.tar")
    assert [sorted(numbers(folder)) for folder in "abc"] == [[0, 1], [2, 3], [4]]
    vehicles = [f"{name}/0.{ending}" for name in ("train", "bus") for ending in ("jpg", "txt")]
    assert (
        len(open_source(write_files(Path("d"), {name: "" if name.endswith("jpg") else "x" for name in vehicles}))) == 2
    )


def test_a_remote_folder_and_a_saved_set_of_training_and_test_are_refused_in_the_same_words(memory):
    for name in ("train/0.tar", "test/0.tar"):
        memory.pipe_file(f"/parts/{name}", b"x")
    write_files(Path("saved"), {"dataset_dict.json": json.dumps({"splits": ["test", "train"]})})
    for address, folder in (("memory://parts/", "memory://parts"), ("saved", "saved")):
        assert f"{address}: holds the parts test, train; give one of them, such as {folder}/train" in refusal(address)


@pytest.mark.parametrize("twin", ["0.tgz", "0.tar.gz", "0.TGZ"])
def test_a_folder_or_star_means_the_shards_and_no_packed_twin_hidden_file_or_index(twin):
    shards("sh/0.tar", "sh/1.tar")
    for name in (twin, "2.tgz"):
        write_tar(Path("sh", name), pair(0))
    write_files(Path("sh"), {"0.parquet": b"x", "0_stats.json": b"x", ".hidden.tar": b"x"})  # as img2dataset leaves
    for _ in range(2):  # there are indexes the second time
        assert numbers("sh") == numbers("sh/*") == [0, 1, 0]
    assert Path("sh/0.tar.index.npz").exists()


@pytest.mark.parametrize(
    ("address", "name"),
    [("deep/**/*.tar", "deep"), ("deep", "deep"), ("deep/0.tar", "0"), ("deep/0.tar:2,deep/a", "0+a")],
)
def test_the_name_of_data_is_known_before_they_are_opened(address, name):
    shards("deep/0.tar", "deep/a/1.tar")
    assert data_name(address) == open_source(address).name == name


# Lists of shards


def test_a_list_of_shards_is_one_source_in_its_order(server):
    shards("data/0.tar", "data/1.tar", "data/2.tar", "data/more/3.tar", "else/0.tar")
    Path("data/shards.txt").write_bytes(b"\xef\xbb\xbf# mine\r\n\r\n2.tar\r\n{0..1}.tar\r\nmore\r\n")
    assert numbers("data/shards.txt") == numbers("data/*.txt") == [2, 0, 1, 3]
    assert numbers("data/shards.txt:2,else/0.tar") == [2, 0, 1, 3, 4]
    write_shards(server.folder, [1, 1, 1])
    Path("remote.txt").write_text(f"{server.url}/00002.tar\n{server.url}/{{00000..00001}}.tar\n")
    assert numbers("remote.txt") == [2, 0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.tar\n7.tar\n", "7.tar: no such file"),
        ("0.tar\n\nnotes.md\n", "notes.md"),
        ("*.tar\n0.tar\n", "0.tar 2 times"),
        ("memory://x/2.tar?key=1\n" * 2, "lists memory://x/2.tar 2 times"),
        ("0.tar\ns3://bucket/0.tar\n", "lists local and remote shards; make two lists"),
        ("0.tar\nicons-30k\n", "icons-30k"),
        ("# nothing\n", "shards.txt: lists no shards; give one path or URL per line"),
        ("1.jpg#0\tA child .\n", "a table of captions begins with a header"),
        ("\udcff", "UTF-8"),
    ],
)
def test_a_wrong_list_of_shards_is_refused_with_what_is_wrong_in_it(text, message):
    shards("0.tar", "notes.md")
    Path("shards.txt").write_text(text, errors="surrogateescape")
    assert message in refusal("shards.txt") and "shards.txt" in refusal("shards.txt")


# Strangers' addresses


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
def test_no_refusal_shows_the_query_of_an_address(address, memory):
    for name in ("train/0.tar", "test/0.tar"):
        memory.pipe_file(f"/parts/{name}", bytes(10240))
    assert "SECRET" not in refusal(address)


@pytest.mark.parametrize(
    "address",
    [
        "reference://0.tar::file:///tmp/references.json",
        "reference://0.tar::file:///tmp/references.json]",  # as if :: were part of a host
        "http://[::1]/0.tar::file:///tmp/references.json",
        "file:///tmp/{a,b::file:///tmp/c}.tar",
        "reference://0.tar",
        "simplecache::https://h/0.tar",
        "sftp://h/0.tar",
        "S3://h/0.tar",
    ],
)
def test_no_address_and_no_line_of_a_list_reaches_file_systems_that_are_not_meant(address):
    Path("shards.txt").write_text(f"{address}\n")
    for place, words in ((address, ()), ("shards.txt", ("no such file", "not exist"))):
        message = refusal(place)
        assert any(word in message for word in ("not supported", "separate several sources with commas", *words))
