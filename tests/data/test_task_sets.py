"""Sets with answers, and CLIP_benchmark's layouts: a set that is not whole is never scored."""

from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path

import numpy as np
import pytest

from tests.builders.data import (
    DEFAULT_TEMPLATES,
    PUZZLES,
    caption_counts,
    captions,
    content,
    faults,
    fingerprint,
    header_of,
    image_bytes,
    metadata,
    npy,
    open_source,
    puzzles,
    read_images,
    refusal,
    retrieval,
    sample,
    travelled,
    write_class_folders,
    write_puzzle_images,
    write_puzzle_table,
    write_tar,
    write_task,
    zero_shot_task,
)

# Zero-shot classification: webdatasets


def test_a_webdataset_gives_names_templates_labels_and_metadata_of_every_id(tmp_path):
    task = zero_shot_task(write_task(tmp_path, with_metadata=True), name="animals")
    assert (task.name, task.classnames[3], len(task.classnames), len(task.templates)) == ("animals", "", 6, 2)
    assert list(task.labels) == [number % 6 for number in range(34)]
    assert task.metadata.dtype == np.int64 and task.metadata.tolist() == [list(metadata(n)) for n in range(34)]
    assert zero_shot_task(write_task(tmp_path / "plain")).metadata is None


def test_labels_and_metadata_follow_the_name_of_the_sample_not_the_order_of_members(tmp_path):
    write_task(tmp_path, sizes=[17], with_metadata=True)
    members = [member for number in range(17) for member in sample(number, with_metadata=True)]
    random.Random(1).shuffle(members)
    write_tar(tmp_path / "test" / "0.tar", members)
    task = zero_shot_task(tmp_path)
    order = [int(task.source.where(id).split(": s")[1][:7]) for id in range(17)]
    assert order != sorted(order) and list(task.labels) == [number % 6 for number in order]
    assert task.metadata.tolist() == [list(metadata(number)) for number in order]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (npy(1, 2), "0.tar: s0000003.npy: has 2 numbers, others have 4"),
        (None, "0.tar: s0000003.png: has no npy member, others have 4 numbers"),
        (b"no array", "0.tar: s0000003.npy: is not a whole array of numbers"),
        (npy(1, 2, 3, 4)[:-9], "0.tar: s0000003.npy: is not a whole array of numbers"),
        ("object", "0.tar: s0000003.npy: is not a whole array of numbers (Object arrays cannot be loaded"),
        ("float", "0.tar: s0000003.npy: has shape (4,) and type float64"),
    ],
)
def test_metadata_that_do_not_fit_are_refused_with_their_member(tmp_path, data, expected):
    if isinstance(data, str):
        np.save(tmp_path / "x.npy", np.array([1, 2, 3, 4], dtype=data), allow_pickle=True)
        data = (tmp_path / "x.npy").read_bytes()
    write_task(tmp_path, sizes=[9], with_metadata=True)
    members = [member for number in range(9) for member in sample(number, with_metadata=True)]
    changed = [(name, data if name == "s0000003.npy" else old) for name, old in members]
    write_tar(tmp_path / "test" / "0.tar", [member for member in changed if member[1] is not None])
    assert expected in refusal(lambda: zero_shot_task(tmp_path))


def test_metadata_may_be_stored_as_different_kinds_of_whole_numbers(tmp_path):
    write_task(tmp_path, sizes=[3])
    members = []
    for number, kind in enumerate(["int64", ">i4", "uint8"]):
        stream = io.BytesIO()
        np.save(stream, np.array([number, 200], dtype=kind))
        members += [*sample(number), (f"s{number:07d}.npy", stream.getvalue())]
    write_tar(tmp_path / "test" / "0.tar", members)
    found = zero_shot_task(tmp_path).metadata
    assert found.dtype == np.int64 and found.tolist() == [[0, 200], [1, 200], [2, 200]]


def test_train_beside_test_is_not_read_and_shards_are_read_in_the_order_of_their_numbers(tmp_path):
    write_task(tmp_path, sizes=[1] * 11)
    write_tar(tmp_path / "train" / "0.tar", sample(1))
    (tmp_path / "train" / "nshards.txt").write_text("1")
    assert list(zero_shot_task(tmp_path).labels) == [number % 6 for number in range(11)]  # not 0, 1, 10, 2


def test_a_set_without_templates_gets_the_default_ones_and_says_so(tmp_path, capsys):
    assert zero_shot_task(write_task(tmp_path, templates=None)).templates == list(DEFAULT_TEMPLATES)
    assert DEFAULT_TEMPLATES[0] in capsys.readouterr().err


def test_class_names_are_cut_at_line_feeds_alone(tmp_path):
    write_task(tmp_path, sizes=[2])
    (tmp_path / "classnames.txt").write_bytes("\ufeffcat\r\nsea\u2028horse\r\n".encode())
    assert zero_shot_task(tmp_path).classnames == ["cat", "sea\u2028horse"]


SHARD = "test/1.tar"
COUNT = "test/nshards.txt"


def spoil(folder: Path, how: str) -> None:
    if how == "cut off":
        whole = (folder / SHARD).read_bytes()
        (folder / SHARD).write_bytes(whole[: header_of(whole, 3) + 514])
    elif how.startswith("no "):
        (folder / how.removeprefix("no ")).unlink()
    else:
        name, _, text = how.partition(" = ")
        (folder / name).write_text(text)


INCOMPLETE = [
    ("cut off", "test/1.tar at byte"),
    (f"{COUNT} = 3", "test/2.tar: missing"),
    (f"{COUNT} = 1", "test/1.tar: is not among the 1 shards"),
    (f"{COUNT} = two", "nshards.txt: 'two' is not a number"),
    (f"no {COUNT}", "nshards.txt: no such file"),
    (f"no {SHARD}", "test/1.tar: missing"),
]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        *INCOMPLETE,
        ("no classnames.txt", "classnames.txt: no such file; write one class name per line"),
        ("classnames.txt = \n", "classnames.txt: the file is empty"),
        ("classnames.txt = cat\ndog\n", "classnames.txt has 2 lines"),
        ("dataset_type.txt = retrieval\n", "give it as retrieval data"),
    ],
)
def test_an_incomplete_webdataset_is_one_line_with_its_file(tmp_path, how, expected):
    spoil(write_task(tmp_path), how)
    assert expected in refusal(lambda: zero_shot_task(tmp_path))


def test_other_folders_are_answered_with_the_right_one(tmp_path):
    write_task(tmp_path / "wds_vtab-dtd_test", sizes=[1])
    inside = tmp_path / "wds_vtab-dtd_test" / "test"
    assert f"did you mean {inside.parent}?" in refusal(lambda: zero_shot_task(inside))
    assert f"did you mean {inside.parent}?" in refusal(lambda: zero_shot_task(tmp_path / "wds_vtab-dtd-test"))


# Zero-shot classification: class folders


def test_class_folders_are_classes_in_the_order_of_their_names(tmp_path):
    write_class_folders(tmp_path, golden_retriever=2, cat=3, empty=0)
    (tmp_path / "cat" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "cat" / "deep" / "er" / "a.jpg").write_bytes(image_bytes(9, "jpg"))
    (tmp_path / "golden_retriever" / "001.png").write_bytes(b"no image")
    task = zero_shot_task(tmp_path)
    assert task.classnames == ["cat", "empty", "golden retriever"]
    assert list(task.labels) == [0, 0, 0, 0, 2, 2] and task.templates == list(DEFAULT_TEMPLATES)
    places = [str(tmp_path / "cat" / "deep" / "er" / "a.jpg"), str(tmp_path / "golden_retriever" / "000.png")]
    assert [task.source.where(id) for id in (3, 4)] == places
    assert content(travelled(task.source))[3] == (image_bytes(9, "jpg"), ())
    found = [fault for batch in read_images(task.source) for fault in batch.faults]
    assert [(fault.id, fault.reason) for fault in found] == [(5, "image does not decode")]


def test_class_folders_take_names_and_templates_from_files_beside_them(tmp_path, capsys):
    write_class_folders(tmp_path, n02=1, n01=1)
    (tmp_path / "classnames.txt").write_text("tench\ngoldfish\n")
    (tmp_path / "zeroshot_classification_templates.txt").write_text("the {c}\n")
    task = zero_shot_task(tmp_path)
    assert (task.classnames, task.templates, list(task.labels)) == (["tench", "goldfish"], ["the {c}"], [0, 1])
    assert task.source.where(0).endswith("n01/001.png") and "line 1 names the class of n01" in capsys.readouterr().err
    (tmp_path / "classnames.txt").write_text("tench\n")
    assert "1 class name for 2 class folders" in refusal(lambda: zero_shot_task(tmp_path))


def test_test_alone_is_used_and_a_choice_of_parts_is_refused(tmp_path):
    write_class_folders(tmp_path / "test", cat=1, dog=2)
    (tmp_path / "classnames.txt").write_text("kitten\npuppy\n")
    assert zero_shot_task(tmp_path).classnames == ["kitten", "puppy"]
    (tmp_path / "train").mkdir()
    message = refusal(lambda: zero_shot_task(tmp_path))
    assert f"holds the parts test, train; give one of them, such as {tmp_path}/test" in message
    assert list(zero_shot_task(tmp_path / "test").labels) == [0, 1, 1]
    write_class_folders(tmp_path / "vehicles", bus=1, train=1)
    assert zero_shot_task(tmp_path / "vehicles").classnames == ["bus", "train"]


def test_images_outside_of_class_folders_are_counted(tmp_path):
    write_class_folders(tmp_path, cat=1, dog=1)
    (tmp_path / "a.png").write_bytes(image_bytes(5))
    (tmp_path / "cat" / "b.heic").write_bytes(b"x")
    source = zero_shot_task(tmp_path).source
    reasons = {reason for reason, _, _ in faults(source)}
    assert len(source) == 2 and reasons == {"lies in no class folder", "kind of image is not read"}


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, "neither class folders with images nor test/0.tar"),
        ({"cat": 0, "dog": 0}, "neither class folders with images nor test/0.tar"),
        ({"images": 3}, "has a single class folder, images"),
    ],
)
def test_a_folder_that_cannot_be_classified_is_one_line(tmp_path, counts, expected):
    assert expected in refusal(lambda: zero_shot_task(write_class_folders(tmp_path, **counts)))


# Puzzles


@pytest.mark.parametrize("kind", ["csv", "tsv", "python lists", "jsonl"])
def test_every_spelling_of_the_table_gives_the_same_puzzles(tmp_path, kind):
    write_puzzle_images(tmp_path / "images")
    if kind == "jsonl":
        lines = [{"cue": cue, "candidates": all_, "associations": right} for cue, all_, right in PUZZLES]
        (tmp_path / "puzzles.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif kind == "python lists":
        write_puzzle_table(tmp_path / "x.csv", spell=repr)
    else:
        write_puzzle_table(tmp_path / f"x.{kind}")
    found, source = puzzles(tmp_path)
    assert found == [("winter", (0, 1, 2, 3, 4), (0, 3)), ("food", (1, 4, 5, 0, 3, 2), (1, 5))]
    assert len(source) == 6 and source[1].image == image_bytes(1, "jpg")  # hot_dog.jpg, in both puzzles
    (tmp_path / "snow.png").write_bytes(image_bytes(77))  # in the folder itself: it goes before the one in images
    assert puzzles(tmp_path)[1][0].image == image_bytes(77)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], "x.csv: holds no puzzles"),
        ([("cue", ["snow", "moon"], ["snow"])], "x.csv row 1: no image of 'moon'"),
        ([("cue", ["snow", "ice"], ["car"])], "x.csv row 1: association 'car' is not among the candidates"),
        ([("cue", ["snow", "ice"], [])], "x.csv row 1: its associations are not a list of names"),
        ([("", ["snow", "ice"], ["ice"])], "x.csv row 1: has no cue"),
        ([("cue", "snow", ["ice"])], "x.csv row 1: its candidates are not a list of names"),
    ],
)
def test_a_wrong_row_of_a_puzzle_is_one_line_with_its_place(tmp_path, rows, expected):
    write_puzzle_images(tmp_path)
    write_puzzle_table(tmp_path / "x.csv", rows)
    assert expected in refusal(lambda: puzzles(tmp_path))


def test_a_folder_without_one_table_of_puzzles_is_refused(tmp_path):
    assert "no such folder" in refusal(lambda: puzzles(tmp_path / "nowhere"))
    write_puzzle_images(tmp_path)
    (tmp_path / "other.csv").write_text("image,caption\n")
    message = refusal(lambda: puzzles(tmp_path))
    assert "no .csv, .tsv or .jsonl file with the columns cue, candidates, associations" in message
    write_puzzle_table(tmp_path / "x.csv")
    write_puzzle_table(tmp_path / "y.tsv")
    assert "has x.csv and y.tsv" in refusal(lambda: puzzles(tmp_path))


# Retrieval: a mark makes every line a caption


def text_of(number: int) -> str:
    """Captions of image `number`, one per line; some sets end the last line and some do not."""
    return "\n".join(f"caption {k} of image {number}" for k in range(4 + number % 3)) + "\n" * (number % 2)


def mark(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset_type.txt").write_text("retrieval\n")
    return folder


def write_set(folder: Path) -> Path:
    """As clip_benchmark's exporter writes it: seven images."""
    for shard, numbers in enumerate((range(4), range(4, 7))):
        members = []
        for number in numbers:
            image = (f"s{number:07d}.webp", image_bytes(number, "webp"))
            members += [image, (f"s{number:07d}.txt", text_of(number).encode())]
        write_tar(folder / "test" / f"{shard}.tar", members)
    (folder / "test" / "nshards.txt").write_text("2\n")
    return mark(folder)


@pytest.mark.parametrize("address", ["{}", "{}/test", "{}/test/*.tar", "{}/test/{{0,1}}.tar"])
def test_each_line_is_a_caption_whether_the_set_its_test_part_or_its_shards_are_given(tmp_path, address):
    folder = write_set(tmp_path / "wds_flickr30k")
    source = retrieval(address.format(folder))
    assert captions(source) == [tuple(text_of(number).splitlines()) for number in range(7)]
    assert caption_counts(source) == "7 samples with 34 captions (4 to 6 each)"  # 4 5 6 4 5 6 4


def test_the_test_part_is_measured_beside_a_training_part_and_other_keys_of_the_run_do_not_hold(tmp_path):
    folder = write_set(tmp_path / "set")
    write_tar(folder / "train" / "0.tar", [("0.png", image_bytes(0)), ("0.txt", b"to train on")])
    assert len(retrieval(folder, "--data.caption_key", "alt")) == 7
    assert "holds the parts test, train" in refusal(folder)
    assert captions(open_source(folder / "train")) == [("to train on",)]


def test_without_the_mark_a_text_stays_one_caption_and_a_line_says_so_once(tmp_path, capsys):
    folder = write_set(tmp_path / "set")
    marked = fingerprint(open_source(folder))
    (folder / "dataset_type.txt").write_text("classification")
    whole = fingerprint(open_source(folder))
    for _ in range(2):
        source = retrieval(folder)
    assert captions(source) == [(text_of(number).strip(),) for number in range(7)] and whole != marked
    assert capsys.readouterr().err.count("have several lines and are read as one caption each; if every line is") == 1
    mark(folder)  # the stored indexes of both meanings live side by side
    assert fingerprint(open_source(folder)) == marked
    (folder / "dataset_type.txt").unlink()
    assert fingerprint(open_source(folder)) == whole


def test_packed_shards_other_names_and_folders_of_images_are_read_by_lines_where_they_are_marked(tmp_path):
    plain = write_set(tmp_path / "set") / "test" / "0.tar"
    (mark(tmp_path / "packed") / "0.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.rename(mark(tmp_path / "flat") / "own-name.tar")
    for folder in ("packed", "flat"):
        assert captions(retrieval(tmp_path / folder))[3] == tuple(text_of(3).splitlines())
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "0.png").write_bytes(image_bytes(0))
    (tmp_path / "photos" / "0.txt").write_bytes(b"one\r\ntwo\n\n")
    assert captions(retrieval(tmp_path / "photos")) == [("one\r\ntwo",)]
    source = retrieval(mark(tmp_path / "photos"))
    assert captions(source) == [("one", "two")] and faults(source) == []


def test_marked_and_other_shards_are_not_one_source(tmp_path):
    folder = write_set(tmp_path / "set")
    other = write_tar(tmp_path / "other" / "0.tar", [("0.png", image_bytes(0)), ("0.txt", b"a\nb")])
    (tmp_path / "list.txt").write_text(f"{folder}/test\n{other}\n")
    assert "between commas" in refusal(lambda: retrieval(tmp_path / "list.txt"))
    assert [len(retrieval(f"{folder}/test,{other}")[id].captions) for id in (0, 7)] == [4, 1]


@pytest.mark.parametrize(("how", "expected"), INCOMPLETE)
@pytest.mark.parametrize("address", ["set", "set/test"])
def test_a_retrieval_set_that_is_not_whole_is_refused_in_one_line(tmp_path, how, expected, address):
    spoil(write_set(tmp_path / "set"), how)
    assert expected in refusal(lambda: retrieval(tmp_path / address))
