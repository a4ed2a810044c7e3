"""An address means exactly the files it says, or is refused in one line that says what to write."""

from __future__ import annotations

import gzip
import json
from fractions import Fraction
from pathlib import Path

import fsspec
import pytest

from neuclip.data.locations import MOST_NAMES, expand_braces, files_of, parts_of
from neuclip.data.open import open_source, short_name
from neuclip.errors import UserError
from tests.builders.server import QUICK
from tests.data.small_shards import image_bytes, pair, write_shards, write_tar


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def shards(*names: str) -> None:
    """One pair each; the caption tells which."""
    for number, name in enumerate(names):
        write_tar(Path(name), pair(number))


def captions(address: str) -> list[int]:
    return [int(caption.removeprefix("image ")) for caption in open_source(address, limits=QUICK).captions()]


def refusal(address: str) -> str:
    with pytest.raises(UserError) as caught:
        open_source(address, limits=QUICK)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("s/{08..11}.tar", "s/08.tar s/09.tar s/10.tar s/11.tar"),
        ("{a,b}/{0..1}.tar", "a/0.tar a/1.tar b/0.tar b/1.tar"),
        ("{098..100}", "098 099 100"),
        ("{8..010}", "008 009 010"),
        ("{a..c}", "a b c"),
        ("{0..4..2}", "0 2 4"),
        ("{3..0}", "3 2 1 0"),
        ("{a,b{1,2}}", "a b1 b2"),
        ("x{,.gz}", "x x.gz"),
        ("{a", "{a"),
        ("{a}", "{a}"),
        ("a}b{", "a}b{"),
    ],
)
def test_brace_patterns_mean_what_bash_means(pattern, names):
    assert expand_braces(pattern) == names.split()


def test_a_range_of_too_many_names_is_refused_before_it_is_expanded():
    for pattern in ("{0..99999999999}.tar", "{a..z}" * 6, "{0..9999}{0..9999}"):
        with pytest.raises(UserError, match="more than 1,000,000 files"):
            expand_braces(pattern)
    assert len(expand_braces(f"{{1..{MOST_NAMES}}}")) == MOST_NAMES


def test_weights_are_split_from_addresses():
    Path("odd:2").mkdir()
    assert parts_of("a.csv:2, s/{0,1}.tar:0.5,b") == [("a.csv", 2), ("s/{0,1}.tar", Fraction(1, 2)), ("b", 1)]
    assert parts_of("{a,b{1,2}}.tar,c") == [("{a,b{1,2}}.tar", 1), ("c", 1)]
    assert parts_of("http://host:8080,http://host:8080/x:3") == [("http://host:8080", 1), ("http://host:8080/x", 3)]
    assert parts_of("http://[::1]:80/x.tar") == [("http://[::1]:80/x.tar", 1)]
    assert parts_of("odd:2") == [("odd:2", 1)]
    many = ",".join(f"shards-{number}" for number in range(3000))
    assert len(parts_of(many)) == 3000
    for wrong in ("a,,b", "a:0", "a:-1", "a:1e2,b"):
        with pytest.raises(UserError):
            parts_of(wrong)


def test_a_comma_in_the_name_of_an_existing_file_does_not_split_it():
    shards("odd/a,b.tar", "sh/0.tar", "odd/a")
    assert parts_of("odd/a,b.tar:2") == [("odd/a,b.tar", 2)]
    assert parts_of("sh,odd/a,b.tar,sh:3") == [("sh", 1), ("odd/a,b.tar", 1), ("sh", 3)]
    assert captions("odd/a,b.tar,sh") == [0, 1]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["spl/train/00000.tar", "spl/test/00000.tar"], "parts test, train; give one of them, such as spl/train"),
        (
            ["spl/train-0.tar", "spl/train-1.tar", "spl/val-0.tar"],
            "parts train, val; give one of them, such as 'spl/train*.tar'",
        ),
        (
            ["spl/cc3m-train-0000.tar", "spl/cc3m-validation-0000.tar"],
            "parts train, validation; give one of them, such as spl/cc3m-train-0000.tar",
        ),
        (["spl/00000.tar", "spl/test/00000.tar"], "part test beside other data; move test elsewhere"),
        (["spl/train.parquet", "spl/test.parquet"], "parts test, train; give one of them, such as spl/train.parquet"),
        (["spl/train/0.parquet", "spl/held-out/0.parquet"], "parts held-out, train; give one of them"),
        (["spl/a-00000-of-00002.parquet", "spl/b-00000-of-00001.parquet"], "parts a, b; give one"),
        (["spl/train.csv", "spl/dev.csv"], "parts dev, train; give one of them, such as spl/train.csv"),
        (["spl/train2017/a.jpg", "spl/val2017/b.jpg"], "parts train2017, val2017; give one"),
        (["spl/a.jpg", "spl/test/b.jpg"], "part test beside other data; move test elsewhere"),
        (["spl/bus/a.jpg", "spl/validation/b.jpg"], "part validation beside other data; move"),
        (["spl/BUILD.json", "spl/train/0.tar", "spl/new-drawings/0.tar"], "parts new-drawings, train; give one"),
    ],
)
def test_a_folder_of_training_and_test_is_never_read_as_one(names, message):
    shards(*names)
    assert f"spl: holds the {message}" in refusal("spl")
    if names[-1].endswith(".tar"):
        assert f"holds the {message.split(',')[0]}" in refusal(f"file://{Path('spl').absolute()}")


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
    assert refusal(address).startswith("sh/1.tar: is a link to /nowhere/1.tar, which is gone; bring that back")


def test_a_link_to_a_folder_of_shards_that_is_gone_is_an_error():
    shards("sh/0.tar")
    Path("sh/more").symlink_to("/nowhere")
    assert refusal("sh").startswith("sh/more: is a link to /nowhere, which is gone")


@pytest.mark.parametrize("name", ["two", "one/two.v2", "jpg"])
def test_a_link_to_a_folder_of_images_that_is_gone_is_an_error(name):
    for path, content in (("pics/one/0.png", image_bytes(0)), ("pics/one/0.txt", b"image 0"), ("more/a", b"")):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)
    Path("pics", name).symlink_to(Path("more").absolute())
    assert captions("pics") == [0]
    Path("pics", name).unlink()
    Path("pics", name).symlink_to("/nowhere")
    assert refusal("pics").startswith(f"pics/{name}: is a link to /nowhere, which is gone; bring that back")
    Path("pics", name).unlink()
    Path("pics", name).symlink_to(Path(name).name)
    assert "which is gone; bring that back, or remove the link" in refusal("pics")


def test_what_is_gone_is_not_proposed():
    shards("sh/00000.tar")
    Path("sh/00021.tar").symlink_to("/nowhere/1.tar")
    assert "did you mean sh/00000.tar" in refusal("sh/00022.tar")


def test_two_stars_reach_every_depth():
    shards("deep/0.tar", "deep/a/1.tar", "deep/a/b/2.tar")
    assert captions("deep/**/*.tar") == [0, 1, 2] and short_name("deep/**/*.tar") == "deep"


def test_a_star_means_the_shards_again_after_they_were_indexed():
    shards("sh/00000.tar", "sh/00001.tar")
    for name in ("00000.parquet", "00000_stats.json", ".hidden.tar"):  # img2dataset's, and an editor's
        Path("sh", name).write_bytes(b"x")
    Path("sh/00001.tar.gz").write_bytes(gzip.compress(Path("sh/00001.tar").read_bytes()))
    for _ in range(2):
        assert captions("sh/*") == [0, 1]
    assert Path("sh/00000.tar.index.npz").exists()
    Path("sh/pairs.csv").write_text("image,caption\n")
    assert "sh/pairs.csv: is of another kind than sh/00000.tar; give one kind ('sh/*.tar')" in refusal("sh/*")


@pytest.mark.parametrize("twin", ["0.tgz", "0.tar.gz", "0.TGZ"])
def test_a_packed_twin_beside_its_shard_shows_no_sample_twice(twin):
    shards("sh/0.tar", "sh/1.tar")
    for name in (twin, "2.tgz"):
        Path("sh", name).write_bytes(gzip.compress(Path("sh/0.tar").read_bytes()))
    assert captions("sh") == captions("sh/*") == [0, 1, 0]


def test_braces_and_stars_combine_and_each_must_match():
    shards("g/0.tar", "g/1.tar", "sh/0.tar")
    assert captions("{g,sh}/*.tar") == [0, 1, 2]
    assert "1 of 2 patterns match no file, first of all no/*.tar" in refusal("{g,no}/*.tar")


def test_a_pattern_of_folders_is_refused_and_the_folders_proposed():
    shards("g/0.tar", "sh/0.tar", "sh/1.tar")
    assert "names folders; give g,sh" in refusal("{g,sh}") and "give g,sh" in refusal("*")
    assert captions("g,sh") == [0, 1, 2]


def test_a_list_of_shards_is_one_source_in_its_order():
    shards("data/0.tar", "data/1.tar", "data/2.tar", "data/more/3.tar")
    Path("data/shards.txt").write_bytes(b"\xef\xbb\xbf# mine\r\n\r\n2.tar\r\n{0..1}.tar\r\nmore\r\n")
    assert captions("data/shards.txt") == captions("data/*.txt") == [2, 0, 1, 3]
    source = open_source("data/shards.txt:2,data/0.tar")
    assert [len(part) for part in source.sources] == [4, 1] and source.name == "shards+0"


def test_a_list_of_remote_shards_is_one_source_in_its_order(server):
    write_shards(server.folder, [1, 1, 1])
    Path("shards.txt").write_text(f"{server.url}/00002.tar\n{server.url}/{{00000..00001}}.tar\n")
    assert captions("shards.txt") == [2, 0, 1]
    Path("shards.txt").write_text(f"{server.url}/00002.tar?id=1\n{server.url}/00002.tar?id=2\n")
    assert captions("shards.txt") == [2, 2]  # other queries may be other files
    Path("shards.txt").write_text(f"{server.url}/00002.tar?key=1\n" * 2)
    assert f"lists {server.url}/00002.tar 2 times" in refusal("shards.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.tar\n7.tar\n", "shards.txt line 2 (a list of shards, one address per line): 7.tar: no such file"),
        ("0.tar\n\nnotes.md\n", "shards.txt line 3 (a list of shards, one address per line): notes.md: is not a tar"),
        ("*.tar\n0.tar\n", "shards.txt: lists 0.tar 2 times; list it once"),
        ("0.tar\ns3://bucket/0.tar\n", "shards.txt: lists local and remote shards; make two lists"),
        ("0.tar\nicons-30k\n", "shards.txt line 2: icons-30k is a data set by name, and a list names shards; give it"),
        ("# nothing\n", "shards.txt: lists no shards; give one address per line"),
        ("\udcff", "shards.txt: cannot be read as a list of shards"),
    ],
)
def test_a_wrong_list_of_shards_is_refused_with_its_line(text, message):
    shards("0.tar", "notes.md")
    Path("shards.txt").write_text(text, errors="surrogateescape")
    assert message in refusal("shards.txt")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("a.tar::b.tar", "give a.tar,b.tar"),
        ("s3://x/a.tar::s3://x/b.tar", "give s3://x/a.tar,s3://x/b.tar"),
        ("pipe:cat x.tar", "commands are not run; give the address itself: x.tar"),
        ("pipe:aws s3 cp s3://x/{0..9}.tar -", "give the address itself: s3://x/{0..9}.tar"),
        ("sh:-1", "a weight is a number above 0; give sh:2 or sh:0.5"),
        ("sh:1e2,sh", "a weight is a number above 0; give sh:2 or sh:0.5"),
        ("x.tar.bz2", "unpack it, or make a .tar or .tar.gz"),
        ("x.tar.xz", "unpack it, or make a .tar or .tar.gz"),
        ("x.zip", "unpack it, or make a .tar or .tar.gz"),
        ("http://127.0.0.1:9/pairs.csv", "only tar shards can be remote; fetch it and give the local file"),
        ("s3://x/{0..3}.parquet", "only tar shards can be remote; fetch it and give the local file"),
        ("sh/{a,b", "sh/{a,b: no such file or folder; a pattern has closed braces"),
        ("{a," * 500 + "}" * 500, "(2,000 letters): too many braces inside each other; write the names into a list"),
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


def test_files_are_sorted_by_path_whatever_the_pattern_counts():
    shards("2.tar", "0.tar", "1.tar")
    assert files_of("{2..0}.tar") == files_of("?.tar") == [Path("0.tar"), Path("1.tar"), Path("2.tar")]
