"""The same pairs are the same pairs in whatever files they lie: ids, captions, pixels, fingerprint and faults."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuclip.data.decoding import decode
from tests.builders.data import (
    KINDS,
    image_bytes,
    lengths,
    samples,
    several,
    write,
    write_files,
    write_images,
    write_parquet,
    write_tar,
)
from tests.builders.reading import (
    batches,
    caption_counts,
    captions,
    content,
    failure,
    fault_of,
    faults,
    fingerprint,
    open_source,
    outcomes,
    read_images,
    travelled,
)

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
IN_ONE_FILE = ("tar", "shards", "packed tar", "parquet", "parquet of structs", "folder of parquet", "saved data set")


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
    own_files = source.folder is not None and source.folder.is_relative_to(tmp_path)
    assert own_files if kind not in IN_ONE_FILE else source.folder is None


@pytest.mark.parametrize("kind", KINDS)
def test_several_captions_of_a_sample_are_all_read_and_counted_in_every_kind(tmp_path, kind):
    source = open_source(write(kind, tmp_path / "data", several(CAPTIONS)))
    usable = [tuple(text for text in texts if text.strip()) for texts in CAPTIONS]
    assert [source[id].captions for id in range(7) if id != 3] == [texts for texts in usable if texts]
    assert fault_of(source, 3).reason in ("caption is missing", "caption is empty")
    assert caption_counts(source) == "7 samples with 11 captions (1 to 3 each); 1 without"
    assert fingerprint(source) == fingerprint(open_source(write("tar", tmp_path / "reference", several(CAPTIONS))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_spoilt_image_is_bad_alone_in_every_kind(tmp_path, kind):
    source = open_source(write(kind, tmp_path, samples(5), spoilt=(1, 3)))
    (batch,) = read_images(source, batch_size=5)
    assert [(fault.id, fault.reason) for fault in batch.faults] == [(id, "image does not decode") for id in (1, 3)]
    assert batch.ids.tolist() == [0, 2, 4]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "packed tar"])  # its copy is in the cache
def test_data_that_are_moved_away_while_they_are_read_end_the_run_and_spoil_no_sample(tmp_path, kind):
    source = open_source(write(kind, tmp_path / "data", samples(5)))
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    message = failure(lambda: source[1])
    assert str(tmp_path / "data") in message and "--resume" in message


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "shards", "folder"])
def test_every_caption_counts_in_the_fingerprint_and_whose_it_is(tmp_path, kind):
    others = [
        [["one", "eins"], ["two", "un"], *CAPTIONS[2:]],  # moved to another sample
        [["one", "un", "eins"], *CAPTIONS[1:]],
        [["one", "eins un"], *CAPTIONS[1:]],
        [["one", "1:ein", "s"], *CAPTIONS[1:]],
        [["one"], *CAPTIONS[1:]],
        [*CAPTIONS[:-1], ["six\0é", "b"]],
        [["ab"], ["c"]],
        [["a"], ["bc"]],
        [["c"], ["ab"]],
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


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="a \0\t\n\u3000\x1f\x85\ufeff", max_size=8))
def test_a_caption_has_no_blanks_zeros_or_marks_around_it_in_any_kind(tmp_path, text):
    write_files(tmp_path, {"a.png": image_bytes(0), "x.jsonl": json.dumps({"image": "a.png", "caption": text})})
    write_tar(tmp_path / "0.tar", [("a.png", image_bytes(0)), ("a.txt", text.encode())])
    found = [outcomes(open_source(tmp_path / name))[0] for name in ("x.jsonl", "0.tar")]
    assert found == [text.strip(" \0\t\n\u3000\x1f\x85\ufeff") or "caption is empty"] * 2


def test_a_mark_in_front_of_utf_8_is_no_part_of_a_caption_in_any_kind_of_file(tmp_path):
    images = [(f"{number}.png", image_bytes(number)) for number in range(2)]
    texts = [(f"{number}.txt", f"\ufeffcap {number}\r\n".encode()) for number in range(2)]
    objects = [(f"{n}.json", b"\xef\xbb\xbf" + json.dumps({"caption": f"\ufeffcap {n}"}).encode()) for n in range(2)]
    write_tar(tmp_path / "txt.tar", [*images, *texts])
    write_tar(tmp_path / "json.tar", [*images, *objects])
    write_files(tmp_path / "folder", dict(images + texts))
    rows = [(f"folder/{number}.png", f"\ufeffcap {number}") for number in range(2)]
    lines = "\n".join(json.dumps({"image": image, "caption": text}) for image, text in rows)
    write_files(tmp_path, {"pairs.csv": "\ufeffimage,caption\n" + "".join(f"{a},{b}\n" for a, b in rows)})
    write_files(tmp_path, {"pairs.jsonl": f"\ufeff{lines}"})
    names = ("folder", "pairs.csv", "pairs.jsonl", "txt.tar", "json.tar")
    sources = [open_source(tmp_path / name) for name in names]
    assert [captions(source) for source in sources] == [[("cap 0",), ("cap 1",)]] * 5
    assert len({fingerprint(source) for source in sources}) == 1


def test_numbers_are_the_same_captions_in_every_kind_of_file(tmp_path):
    write_images(tmp_path, several([[], []]))
    rows = [{"image": "000.png", "caption": 1984}, {"image": "001.png", "caption": 7}]
    write_files(tmp_path, {"pairs.csv": "image,caption\n000.png,1984\n001.png,7\n"})
    write_files(tmp_path, {"pairs.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    write_parquet(tmp_path / "pairs.parquet", {"image": ["000.png", "001.png"], "caption": [1984, 7]})
    described = [(f"{number}.json", json.dumps(row).encode()) for number, row in enumerate(rows)]
    write_tar(tmp_path / "pairs.tar", [*((f"{number}.png", image_bytes(number)) for number in range(2)), *described])
    sources = [open_source(tmp_path / f"pairs.{kind}") for kind in ("csv", "jsonl", "parquet", "tar")]
    assert [content(source) for source in sources] == [[(image_bytes(0), ("1984",)), (image_bytes(1), ("7",))]] * 4
    assert len({fingerprint(source) for source in sources}) == 1
    odd = '{"image": "000.png", "caption": [NaN, Infinity, null, true, 0.5, 1' + "0" * 400 + "]}"
    assert captions(open_source(write_files(tmp_path, {"odd.jsonl": odd}) / "odd.jsonl")) == [("0.5", "1" + "0" * 400)]
