"""Sets with answers, and CLIP_benchmark's layouts: a set that is not whole is never scored."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from neuclip.data.task_sets import DEFAULT_TEMPLATES, ZeroShotTask, read_puzzles
from tests.builders.data import (
    header_of,
    image_bytes,
    labelled,
    metadata,
    npy,
    write_class_folders,
    write_files,
    write_puzzles,
    write_tar,
    write_task,
)
from tests.builders.reading import (
    caption_counts,
    captions,
    content,
    faults,
    fingerprint,
    open_source,
    read_images,
    refusal,
    retrieval,
    travelled,
)

SHARD, COUNT, TEMPLATES = "test/1.tar", "test/nshards.txt", "zeroshot_classification_templates.txt"


def spoil(folder: Path, how: str) -> None:
    if how == "cut off":
        whole = (folder / SHARD).read_bytes()
        (folder / SHARD).write_bytes(whole[: header_of(whole, 3) + 514])
    elif how.startswith("no "):
        (folder / how.removeprefix("no ")).unlink()
    else:
        name, _, text = how.partition(" = ")
        write_files(folder, {name: text})


INCOMPLETE = [
    ("cut off", "test/1.tar at byte"),
    (f"{COUNT} = 3", "test/2.tar: missing"),
    (f"{COUNT} = 1", "test/1.tar: is not among the 1 shards"),
    (f"{COUNT} = two", "nshards.txt: 'two' is not a number"),
    (f"no {COUNT}", "nshards.txt: no such file"),
    (f"no {SHARD}", "test/1.tar: missing"),
]


# Zero-shot classification: webdatasets


def test_a_webdataset_gives_names_templates_labels_and_metadata_by_the_names_of_its_samples(tmp_path):
    write_task(tmp_path, sizes=[1] * 11, with_metadata=True)  # shards in the order of their numbers: not 0, 1, 10, 2
    write_files(tmp_path, {"train/nshards.txt": "1"})
    write_tar(tmp_path / "train" / "0.tar", labelled(1))  # is not read
    task = ZeroShotTask.open(tmp_path, name="animals")
    assert (task.name, task.classnames[3], len(task.classnames), len(task.templates)) == ("animals", "", 6, 2)
    assert list(task.labels) == [number % 6 for number in range(11)]
    assert task.metadata.dtype == np.int64 and task.metadata.tolist() == [list(metadata(n)) for n in range(11)]
    members = labelled(*range(17), with_metadata=True)
    random.Random(1).shuffle(members)
    write_task(tmp_path / "mixed", sizes=[17])
    write_tar(tmp_path / "mixed" / "test" / "0.tar", members)
    task = ZeroShotTask.open(tmp_path / "mixed")
    order = [int(task.source.where(id).split(": s")[1][:7]) for id in range(17)]
    assert order != sorted(order) and list(task.labels) == [number % 6 for number in order]
    assert task.metadata.tolist() == [list(metadata(number)) for number in order]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (npy(1, 2), "0.tar: s0000003.npy: has 2 numbers, others have 4"),
        (None, "0.tar: s0000003.png: has no npy member, others have 4 numbers"),
        (b"no array", "0.tar: s0000003.npy: is not a complete array of numbers"),
        (npy(1, 2, 3, 4)[:-9], "0.tar: s0000003.npy: is not a complete array of numbers"),
        (npy(1, 2, 3, 4, kind="object"), "is not a complete array of numbers (Object arrays cannot be loaded"),
        (npy(1, 2, 3, 4, kind="float"), "0.tar: s0000003.npy: has shape (4,) and type float64"),
    ],
)
def test_metadata_that_do_not_fit_are_refused_with_their_member(tmp_path, data, expected):
    write_task(tmp_path, sizes=[9], with_metadata=True)
    members = dict(labelled(*range(9), with_metadata=True)) | {"s0000003.npy": data}
    write_tar(tmp_path / "test" / "0.tar", [member for member in members.items() if member[1] is not None])
    assert expected in refusal(lambda: ZeroShotTask.open(tmp_path))


def test_metadata_may_be_stored_as_different_kinds_of_whole_numbers_or_not_at_all(tmp_path):
    write_task(tmp_path, sizes=[3])
    assert ZeroShotTask.open(tmp_path).metadata is None
    kinds = {f"s{number:07d}.npy": npy(number, 200, kind=kind) for number, kind in enumerate(["int64", ">i4", "uint8"])}
    write_tar(tmp_path / "test" / "0.tar", [*labelled(0, 1, 2), *kinds.items()])
    found = ZeroShotTask.open(tmp_path).metadata
    assert found.dtype == np.int64 and found.tolist() == [[0, 200], [1, 200], [2, 200]]


def test_class_names_are_cut_at_line_feeds_alone_and_default_templates_are_told(tmp_path, capsys):
    write_files(write_task(tmp_path, sizes=[2], templates=None), {"classnames.txt": "\ufeffcat\r\nsea\u2028horse\r\n"})
    task = ZeroShotTask.open(tmp_path)
    assert task.classnames == ["cat", "sea\u2028horse"] and task.templates == list(DEFAULT_TEMPLATES)
    assert DEFAULT_TEMPLATES[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        *INCOMPLETE,
        ("no classnames.txt", "classnames.txt: no such file; write one class name per line"),
        ("classnames.txt = \n", "classnames.txt: the file is empty"),
        ("classnames.txt = cat\ndog\n", "classnames.txt has 2 lines"),
        (f"{TEMPLATES} = a photo\n", "templates.txt line 1: no {c} in 'a photo'"),
        ("dataset_type.txt = retrieval\n", "give it as retrieval data"),
    ],
)
def test_an_incomplete_webdataset_is_one_line_with_its_file(tmp_path, how, expected):
    spoil(write_task(tmp_path), how)
    assert expected in refusal(lambda: ZeroShotTask.open(tmp_path))


def test_other_folders_are_answered_with_the_right_one(tmp_path):
    folder = write_task(tmp_path / "wds_vtab-dtd_test", sizes=[1])
    for other in (folder / "test", tmp_path / "wds_vtab-dtd-test"):
        assert f"did you mean {folder}?" in refusal(lambda other=other: ZeroShotTask.open(other))


# Zero-shot classification: class folders


def test_class_folders_are_classes_in_the_order_of_their_names(tmp_path):
    write_class_folders(tmp_path, golden_retriever=2, cat=3, empty=0)
    write_files(tmp_path, {"cat/deep/er/a.jpg": image_bytes(9, "jpg"), "golden_retriever/001.png": b"no image"})
    write_files(tmp_path, {"a.png": image_bytes(5), "cat/b.heic": b"x"})
    task = ZeroShotTask.open(tmp_path)
    assert task.classnames == ["cat", "empty", "golden retriever"]
    assert list(task.labels) == [0, 0, 0, 0, 2, 2] and task.templates == list(DEFAULT_TEMPLATES)
    places = [str(tmp_path / "cat" / "deep" / "er" / "a.jpg"), str(tmp_path / "golden_retriever" / "000.png")]
    assert [task.source.where(id) for id in (3, 4)] == places
    assert content(travelled(task.source))[3] == (image_bytes(9, "jpg"), ())
    found = [fault for batch in read_images(task.source) for fault in batch.faults]
    assert [(fault.id, fault.reason) for fault in found] == [(5, "image does not decode")]
    assert {reason for reason, _, _ in faults(task.source)} == {
        "is in no class folder",
        "image format is not supported",
    }


def test_class_folders_take_names_and_templates_from_files_beside_them(tmp_path, capsys):
    write_class_folders(tmp_path, n02=1, n01=1)
    write_files(tmp_path, {"classnames.txt": "tench\ngoldfish\n", TEMPLATES: "the {c}\n"})
    task = ZeroShotTask.open(tmp_path)
    assert (task.classnames, task.templates, list(task.labels)) == (["tench", "goldfish"], ["the {c}"], [0, 1])
    assert (
        task.source.where(0).endswith("n01/001.png")
        and "line 1 is the class name of folder n01" in capsys.readouterr().err
    )
    write_files(tmp_path, {"classnames.txt": "tench\n"})
    assert "1 class name for 2 class folders" in refusal(lambda: ZeroShotTask.open(tmp_path))


def test_test_alone_is_used_and_a_choice_of_parts_is_refused(tmp_path):
    write_class_folders(tmp_path / "test", cat=1, dog=2)
    write_files(tmp_path, {"classnames.txt": "kitten\npuppy\n"})
    assert ZeroShotTask.open(tmp_path).classnames == ["kitten", "puppy"]
    (tmp_path / "train").mkdir()
    message = refusal(lambda: ZeroShotTask.open(tmp_path))
    assert f"holds the parts test, train; give one of them, such as {tmp_path}/test" in message
    assert list(ZeroShotTask.open(tmp_path / "test").labels) == [0, 1, 1]
    write_class_folders(tmp_path / "vehicles", bus=1, train=1)
    assert ZeroShotTask.open(tmp_path / "vehicles").classnames == ["bus", "train"]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, "neither class folders with images nor test/0.tar"),
        ({"cat": 0, "dog": 0}, "neither class folders with images nor test/0.tar"),
        ({"images": 3}, "has a single class folder, images"),
    ],
)
def test_a_folder_that_cannot_be_classified_is_one_line(tmp_path, counts, expected):
    assert expected in refusal(lambda: ZeroShotTask.open(write_class_folders(tmp_path, **counts)))


# Puzzles


@pytest.mark.parametrize(
    ("table", "options"), [("x.csv", {}), ("x.tsv", {}), ("x.csv", {"spell": repr}), ("x.jsonl", {})]
)
def test_every_spelling_of_the_table_gives_the_same_puzzles(tmp_path, table, options):
    write_puzzles(tmp_path / "images", table, **options)
    (tmp_path / "images" / table).rename(tmp_path / table)
    found = read_puzzles(tmp_path)
    puzzles = [(one.cue, one.candidates, one.associations) for one in found.puzzles]
    assert puzzles == [("winter", (0, 1, 2, 3, 4), (0, 3)), ("food", (1, 4, 5, 0, 3, 2), (1, 5))]
    assert len(found.source) == 6 and found.source[1].image == image_bytes(1, "jpg")  # hot_dog.jpg, in both puzzles
    write_files(tmp_path, {"snow.png": image_bytes(77)})  # in the folder itself: it goes before the one in images
    assert read_puzzles(tmp_path).source[0].image == image_bytes(77)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], "x.csv: has no puzzles"),
        ([("cue", ["snow", "moon"], ["snow"])], "x.csv row 1: no image of 'moon'"),
        ([("cue", ["snow", "ice"], ["car"])], "x.csv row 1: association 'car' is not among the candidates"),
        ([("cue", ["snow", "ice"], [])], "x.csv row 1: its associations are not a list of names"),
        ([("", ["snow", "ice"], ["ice"])], "x.csv row 1: has no cue"),
        ([("cue", "snow", ["ice"])], "x.csv row 1: its candidates are not a list of names"),
    ],
)
def test_a_wrong_row_of_a_puzzle_is_one_line_with_its_place(tmp_path, rows, expected):
    assert expected in refusal(lambda: read_puzzles(write_puzzles(tmp_path, "x.csv", rows)))


def test_a_folder_without_one_table_of_puzzles_is_refused(tmp_path):
    assert "no such folder" in refusal(lambda: read_puzzles(tmp_path / "nowhere"))
    write_files(tmp_path, {"other.csv": "image,caption\n"})
    message = refusal(lambda: read_puzzles(tmp_path))
    assert "no .csv, .tsv or .jsonl file with the columns cue, candidates, associations" in message
    write_puzzles(write_puzzles(tmp_path, "x.csv"), "y.tsv")
    assert "has x.csv and y.tsv" in refusal(lambda: read_puzzles(tmp_path))


# Retrieval: a mark makes every line a caption


def text_of(number: int) -> str:
    """Captions of image `number`, one per line; some sets end the last line and some do not."""
    return "\n".join(f"caption {k} of image {number}" for k in range(4 + number % 3)) + "\n" * (number % 2)


def mark(folder: Path) -> Path:
    return write_files(folder, {"dataset_type.txt": "retrieval\n"})


def write_set(folder: Path) -> Path:
    """As clip_benchmark's exporter writes it: seven images."""
    for shard, numbers in enumerate((range(4), range(4, 7))):
        members = []
        for number in numbers:
            image = (f"s{number:07d}.webp", image_bytes(number, "webp"))
            members += [image, (f"s{number:07d}.txt", text_of(number).encode())]
        write_tar(folder / "test" / f"{shard}.tar", members)
    return mark(write_files(folder, {COUNT: "2\n"}))


@pytest.mark.parametrize("address", ["{}", "{}/test", "{}/test/*.tar", "{}/test/{{0,1}}.tar"])
def test_each_line_is_a_caption_whether_the_set_its_test_part_or_its_shards_are_given(tmp_path, address):
    source = retrieval(address.format(write_set(tmp_path / "wds_flickr30k")))
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
    write_files(folder, {"dataset_type.txt": "classification"})
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
    members = [("0.png", image_bytes(0)), ("0.txt", b"one\r\ntwo\n\n")]
    for name in ("packed/0.tar.gz", "flat/own-name.tar"):
        write_tar(tmp_path / name, members)
    write_files(tmp_path / "photos", dict(members))
    for folder in ("packed", "flat", "photos"):
        assert captions(retrieval(tmp_path / folder)) == [("one\r\ntwo",)]
        source = retrieval(mark(tmp_path / folder))
        assert captions(source) == [("one", "two")] and faults(source) == []


def test_marked_and_other_shards_are_not_one_source(tmp_path):
    folder = write_set(tmp_path / "set")
    other = write_tar(tmp_path / "other" / "0.tar", [("0.png", image_bytes(0)), ("0.txt", b"a\nb")])
    write_files(tmp_path, {"list.txt": f"{folder}/test\n{other}\n"})
    assert "separated by a comma" in refusal(lambda: retrieval(tmp_path / "list.txt"))
    assert [len(retrieval(f"{folder}/test,{other}")[id].captions) for id in (0, 7)] == [4, 1]


@pytest.mark.parametrize(("how", "expected"), INCOMPLETE)
@pytest.mark.parametrize("address", ["set", "set/test"])
def test_a_retrieval_set_that_is_not_whole_is_refused_in_one_line(tmp_path, how, expected, address):
    spoil(write_set(tmp_path / "set"), how)
    assert expected in refusal(lambda: retrieval(tmp_path / address))
