"""The same pairs are the same pairs in whatever files they lie; and what is common to all kinds of source."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.builders.data import (
    KINDS,
    batches,
    caption_counts,
    captions,
    content,
    decode,
    failure,
    fault_of,
    faults,
    fingerprint,
    image_bytes,
    lengths,
    open_source,
    outcomes,
    read_images,
    refusal,
    samples,
    several,
    table,
    training_data,
    travelled,
    write,
    write_parquet,
    write_tar,
)
from tests.builders.images import photo

MARK = b"\xef\xbb\xbf"
# Of each sample; what is blank is no caption, and a sample may have none.
CAPTIONS = [
    ["one", "eins", "un"],
    ["two"],
    ["three", " ", "trois"],
    [],
    ["four 4", "vier"],
    [" ", "five"],
    ["six\0é", "a"],
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_gives_the_same_ids_captions_and_pixels(tmp_path, kind):
    pairs = samples()
    source = open_source(write(kind, tmp_path / "data", pairs))
    assert captions(source) == [one.captions for one in pairs] and len(source) == len(pairs) == 11
    for id, one in enumerate(pairs):
        assert np.array_equal(np.asarray(decode(source[id].image)), np.asarray(decode(one.image)))
    assert faults(source) == [] and fingerprint(source) == fingerprint(open_source(write("tar", tmp_path / "0", pairs)))
    assert caption_counts(source) == "11 samples, 1 caption each"
    assert content(travelled(source)) == content(source) and fingerprint(travelled(source)) == fingerprint(source)
    assert str(tmp_path) in source.where(3) and len({source.where(id) for id in range(11)}) == 11
    for id in (11, -1):
        with pytest.raises(IndexError):
            source[id]
    assert len(next(batches(source, batch_size=22, tokens=lengths)).ids) == 22


@pytest.mark.parametrize("kind", KINDS)
def test_several_captions_of_a_sample_are_all_read_and_counted_in_every_kind(tmp_path, kind):
    source = open_source(write(kind, tmp_path / "data", several(CAPTIONS)))
    usable = [tuple(text for text in texts if text.strip()) for texts in CAPTIONS]
    assert [source[id].captions for id in range(7) if id != 3] == [texts for texts in usable if texts]
    assert fault_of(source, 3).reason in ("caption is missing", "caption is empty")
    assert caption_counts(source) == "7 samples with 11 captions (1 to 3 each); 1 without"
    assert fingerprint(source) == fingerprint(open_source(write("tar", tmp_path / "reference", several(CAPTIONS))))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "shards", "folder"])
def test_every_caption_counts_in_the_fingerprint_and_whose_it_is(tmp_path, kind):
    others = [
        [["one", "eins"], ["two", "un"], *CAPTIONS[2:]],  # moved to another sample
        [["one", "un", "eins"], *CAPTIONS[1:]],
        [["one", "eins un"], *CAPTIONS[1:]],
        [["one", "1:ein", "s"], *CAPTIONS[1:]],
        [["one"], *CAPTIONS[1:]],
        [*CAPTIONS[:-1], ["six\0é", "b"]],
        [texts[:1] for texts in CAPTIONS],
        [["ab"], ["c"]],
        [["a"], ["bc"]],
        [["c"], ["ab"]],
        [["ab"], ["c"], ["d"]],
    ]
    addresses = [write(kind, tmp_path / str(n), several(one)) for n, one in enumerate([CAPTIONS, *others])]
    found = [fingerprint(open_source(address)) for address in addresses]
    assert len(set(found)) == len(found)


def test_parts_of_a_mixture_have_the_fingerprint_of_the_whole(tmp_path):
    whole = open_source(write("jsonl", tmp_path / "whole", several(CAPTIONS)))
    first = write("jsonl", tmp_path / "a", several(CAPTIONS[:3]))
    second = write("shards", tmp_path / "b", several(CAPTIONS[3:]))
    assert fingerprint(open_source(f"{first},{second}")) == fingerprint(whole)
    assert fingerprint(open_source(f"{second},{first}")) != fingerprint(whole)
    assert caption_counts(open_source(f"{first},{second}")) == caption_counts(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_spoilt_image_is_bad_alone_in_every_kind(tmp_path, kind):
    source = open_source(write(kind, tmp_path, samples(5), spoilt=(1, 3)))
    found = list(read_images(source, batch_size=5))
    assert [(fault.id, fault.reason) for batch in found for fault in batch.faults] == [
        (1, "image does not decode"),
        (3, "image does not decode"),
    ]
    assert found[0].ids.tolist() == [0, 2, 4]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "packed tar"])  # its copy is in the cache
def test_data_that_are_moved_away_while_they_are_read_end_the_run_and_spoil_no_sample(tmp_path, kind):
    source = open_source(write(kind, tmp_path / "data", samples(5)))
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    message = failure(lambda: source[1])
    assert str(tmp_path / "data") in message and "--resume" in message


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="a \0\t\n\u3000\x1f\x85\ufeff", max_size=8))
def test_a_caption_has_no_blanks_zeros_or_marks_around_it_in_any_kind(tmp_path, text):
    (tmp_path / "a.png").write_bytes(image_bytes(0))
    (tmp_path / "x.jsonl").write_text(json.dumps({"image": "a.png", "caption": text}))
    write_tar(tmp_path / "0.tar", [("a.png", image_bytes(0)), ("a.txt", text.encode())])
    found = [outcomes(open_source(tmp_path / name))[0] for name in ("x.jsonl", "0.tar")]
    cleaned = text.strip(" \0\t\n\u3000\x1f\x85\ufeff") or found[0]
    assert found == [cleaned] * 2 and (cleaned == cleaned.strip() or cleaned.startswith("caption is"))


def test_a_mark_in_front_of_utf_8_is_no_part_of_a_caption_in_any_kind_of_file(tmp_path):
    (tmp_path / "folder").mkdir()
    rows = [[f"folder/{number}.png", f"\ufeffcap {number}"] for number in range(2)]
    texts = []
    for number in range(2):
        text = MARK + f"cap {number}\r\n".encode()
        texts += [(f"{number}.png", image_bytes(number)), (f"{number}.txt", text)]
    for name, content_ in texts:
        (tmp_path / "folder" / name).write_bytes(content_)
    with (tmp_path / "pairs.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["image", "caption"], *rows])
    lines = (json.dumps({"image": image, "caption": text}) for image, text in rows)
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines), "utf-8-sig")
    write_tar(tmp_path / "txt.tar", texts)
    objects = [(f"{n}.json", MARK + json.dumps({"caption": f"\ufeffcap {n}"}).encode()) for n in range(2)]
    write_tar(tmp_path / "json.tar", [*texts[::2], *objects])
    addresses = ("folder", "pairs.csv", "pairs.jsonl", "txt.tar", "json.tar")
    sources = [open_source(tmp_path / name) for name in addresses]
    assert [captions(source) for source in sources] == [[("cap 0",), ("cap 1",)]] * 5
    assert len({fingerprint(source) for source in sources}) == 1


def test_numbers_are_the_same_captions_in_every_kind_of_file(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(image_bytes(number))
    rows = [{"image": "0.png", "caption": 1984}, {"image": "1.png", "caption": 7}]
    (tmp_path / "pairs.csv").write_text("image,caption\n0.png,1984\n1.png,7\n")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_parquet(tmp_path / "pairs.parquet", {"image": ["0.png", "1.png"], "caption": [1984, 7]})
    described = [(f"{number}.json", json.dumps(row).encode()) for number, row in enumerate(rows)]
    write_tar(tmp_path / "pairs.tar", [*((f"{number}.png", image_bytes(number)) for number in range(2)), *described])
    sources = [open_source(tmp_path / f"pairs.{kind}") for kind in ("csv", "jsonl", "parquet", "tar")]
    assert [content(source) for source in sources] == [[(image_bytes(0), ("1984",)), (image_bytes(1), ("7",))]] * 4
    assert len({fingerprint(source) for source in sources}) == 1
    odd = '{"image": "0.png", "caption": [NaN, Infinity, null, true, 0.5, 1' + "0" * 400 + "]}"
    (tmp_path / "odd.jsonl").write_text(odd)
    assert captions(open_source(tmp_path / "odd.jsonl")) == [("0.5", "1" + "0" * 400)]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([["a"]] * 1200, "1,200 samples, 1 caption each"),
        ([["a"]], "1 sample, 1 caption each"),
        ([["a", "b"]] * 3, "3 samples with 6 captions (2 each)"),
        ([["a", "b"], ["c"], []], "3 samples with 3 captions (1 to 2 each); 1 without"),
        ([["a"], []], "2 samples, 1 caption each; 1 without"),
        ([[], []], "2 samples without captions"),
    ],
)
def test_captions_are_counted_in_words(tmp_path, texts, words):
    lines = [json.dumps({"image": "a.png", "caption": one}) for one in texts]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    assert caption_counts(open_source(tmp_path / "x.jsonl")) == words


@pytest.mark.parametrize(("start", "found"), [("", "tables"), ("{}/tables/", "tables/photos")])
def test_the_folder_of_the_images_is_where_relative_paths_start_or_what_absolute_ones_share(start, found, tmp_path):
    rows = ["image,caption"]
    for number, place in enumerate(("photos/a", "photos/b")):
        (tmp_path / "tables" / place).mkdir(parents=True)
        (tmp_path / "tables" / place / "x.png").write_bytes(image_bytes(number))
        rows.append(f"{start.format(tmp_path)}{place}/x.png,a shape")
    (tmp_path / "tables" / "pairs.csv").write_text("\n".join(rows))
    assert open_source(tmp_path / "tables" / "pairs.csv").folder == tmp_path / found


@pytest.mark.parametrize("kind", KINDS)
def test_only_images_in_files_of_their_own_have_a_folder(tmp_path, kind):
    found = open_source(write(kind, tmp_path, samples(4))).folder
    inside = kind in ("tar", "shards", "packed tar", "parquet", "folder of parquet", "saved data set")
    assert found is None if inside or "structs" in kind else found is not None and found.is_relative_to(tmp_path)


def test_guessed_columns_are_printed_once_and_chosen_ones_are_not(tmp_path, capsys):
    path = write("semicolons", tmp_path, samples(3))
    open_source(path)
    open_source(path)
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "pairs.csv: split at semicolons" in printed
    assert "'path'" in printed and "'text'" in printed and "--data.caption_column" in printed
    open_source(path, image_column="path", caption_column="text")
    assert capsys.readouterr().err == ""


# Common mistakes: one line that says what to do


def test_messages_of_addresses_and_shards_say_what_to_do(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, text in {"notes.md": "x", "page.tar": "<html>" * 200, "zero.tar": "", "page.tar.gz": "<html>"}.items():
        (tmp_path / name).write_text(text)
    assert "icons-30k" in refusal("icon-30k") and "did you mean icons-30k/new-drawings" in refusal(
        "icon-30k/new-drawings"
    )
    assert "no such file or folder" in refusal(tmp_path / "missing")
    assert "no tar shards" in refusal(tmp_path / "empty") and "no images" in refusal(tmp_path / "empty")
    assert "unknown kind" in refusal(tmp_path / "notes.md")
    assert "not a tar file" in refusal(tmp_path / "page.tar")
    assert "shard is empty" in refusal(tmp_path / "zero.tar")
    assert "not a gzip" in refusal(tmp_path / "page.tar.gz").lower()
    assert "2 of 2" in refusal(tmp_path / "{0..1}.tar") and "no file matches" in refusal(tmp_path / "*.tab")
    assert "no data given" in refusal("")


def test_messages_of_tables_say_what_to_do(tmp_path):
    for name, text in {
        "pairs.csv": "url,words\nx,y\n",
        "header.csv": "image,caption\n",
        "a.jsonl": "image,caption\n",
        "b.jsonl": '{"url": 1, "words": 2}\n',
        "empty.jsonl": "",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    message = refusal(tmp_path / "pairs.csv")
    assert "url, words" in message and "--data.image_column" in message
    assert "--data.caption_column" in refusal(tmp_path / "pairs.csv", image_column="url")
    assert "did you mean 'words'" in refusal(tmp_path / "pairs.csv", image_column="url", caption_column="word")
    assert "holds no samples" in refusal(tmp_path / "header.csv")
    assert "one object per line" in refusal(tmp_path / "a.jsonl")
    assert "url, words" in refusal(tmp_path / "b.jsonl")
    assert "empty.jsonl" in refusal(tmp_path / "empty.jsonl")
    assert "another kind" in refusal(tmp_path / "{a.jsonl,a.parquet}")
    assert "between commas" in refusal(tmp_path / "*.jsonl")


def test_messages_of_folders_say_what_to_do(tmp_path):
    for folder in ("bare", "two", "strange", "table"):
        (tmp_path / folder).mkdir()
        if folder != "table":
            (tmp_path / folder / "a.jpg").write_bytes(photo(0))
    (tmp_path / "bare" / "00000_stats.json").write_text("{}")
    for file in ("two/captions.csv", "two/captions.tsv", "strange/captions.csv", "table/pairs.csv"):
        (tmp_path / file).write_text("image,caption\nother.jpg,x\n")
    assert "1 image" in refusal(tmp_path / "bare") and "a.txt beside a.jpg" in refusal(tmp_path / "bare")
    assert "keep one of them" in refusal(tmp_path / "two")
    assert "names none of the 1 images" in refusal(tmp_path / "strange")
    assert "did you mean" in refusal(tmp_path / "table") and "pairs.csv" in refusal(tmp_path / "table")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet of paths"])
def test_a_table_that_leads_to_no_image_is_refused_with_the_folders_that_were_tried(tmp_path, monkeypatch, kind):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    address = Path(write(kind, tmp_path / "data", samples(30)))
    for one in samples(30):
        (tmp_path / "data" / one.name).unlink()
    message = refusal(lambda: training_data("--data.train", str(address)))
    assert "a/000.jpg" in message and f"neither in {tmp_path / 'data'} nor in {tmp_path / 'work'}" in message


def test_one_image_that_is_there_is_enough_to_open_a_table(tmp_path):
    path = table(tmp_path, "image,caption\n" + "missing.jpg,x\n" * 19 + "a.jpg,y\n")
    assert len(training_data("--data.train", str(path))) == 20
    path = table(tmp_path, "image,caption\n1,a.jpg,x\n2,b.jpg,y\n")  # as R writes row names
    assert "none of its 2 rows can be used" in refusal(lambda: training_data("--data.train", str(path)))


def test_a_name_as_long_as_a_page_is_shortened_in_messages(tmp_path):
    page = "x" * 5000
    path = table(tmp_path, f"image,caption\n{page},a caption\n")
    assert len(fault_of(open_source(path), 0).where) < 500
    assert len(refusal(lambda: training_data("--data.train", str(path)))) < 900
    (tmp_path / "odd.csv").write_text(f"{page},{page}y\n")
    assert len(refusal(tmp_path / "odd.csv")) < 900


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_table_without_read_permission_is_refused(tmp_path):
    path = table(tmp_path, "image,caption\na.jpg,x\n")
    path.chmod(0)
    assert "permissions" in refusal(path)


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "[parquet]" in refusal(tmp_path / "a.parquet")
