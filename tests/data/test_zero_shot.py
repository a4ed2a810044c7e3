from __future__ import annotations

import io
import pickle
import random

import numpy as np
import pytest
from neuclip.data.zero_shot import DEFAULT_TEMPLATES, ZeroShotTask

from neuclip.errors import UserError
from neuclip.evaluation.zero_shot import evaluate_task
from tests.data.small_shards import image_bytes, write_tar
from tests.data.small_tasks import metadata, npy, sample, write_class_folders, write_task
from tests.evaluation.small_towers import colour_embedder


def refusal(folder, **options) -> str:
    with pytest.raises(UserError) as caught:
        ZeroShotTask.open(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_webdataset_gives_names_templates_labels_and_metadata_of_every_id(tmp_path):
    task = ZeroShotTask.open(write_task(tmp_path, with_metadata=True), name="animals")
    assert (task.name, task.classnames[3], len(task.classnames), len(task.templates)) == ("animals", "", 6, 2)
    assert task.labels == [number % 6 for number in range(34)]
    assert task.metadata.dtype == np.int64 and task.metadata.tolist() == [list(metadata(n)) for n in range(34)]


def test_metadata_follow_the_name_of_the_sample_not_the_order_of_members(tmp_path):
    write_task(tmp_path, sizes=[17], with_metadata=True)
    members = [member for number in range(17) for member in sample(number, with_metadata=True)]
    random.Random(1).shuffle(members)
    write_tar(tmp_path / "test" / "0.tar", members)
    task = ZeroShotTask.open(tmp_path)
    order = [int(task.source.where(id).split(": s")[1][:7]) for id in range(17)]
    assert order != sorted(order)
    assert task.metadata.tolist() == [list(metadata(number)) for number in order]
    assert task.labels == [number % 6 for number in order]


def test_a_set_without_npy_members_has_no_metadata(tmp_path):
    assert ZeroShotTask.open(write_task(tmp_path)).metadata is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (npy(1, 2), "0.tar: s0000003.npy: has 2 numbers, others have 4"),
        (None, "0.tar: s0000003.png: has no npy member, others have 4 numbers"),
        (b"no array", "0.tar: s0000003.npy: is not a whole array of numbers"),
        (npy(1, 2, 3, 4)[:-9], "0.tar: s0000003.npy: is not a whole array of numbers"),
        ("object", "0.tar: s0000003.npy: is not a whole array of numbers"),
        ("float", "0.tar: s0000003.npy: has shape (4,) and type float64"),
    ],
)
def test_metadata_that_do_not_fit_are_refused_with_their_member(tmp_path, content, expected):
    if isinstance(content, str):
        np.save(tmp_path / "x.npy", np.array([1, 2, 3, 4], dtype=content), allow_pickle=True)
        content = (tmp_path / "x.npy").read_bytes()
    write_task(tmp_path, sizes=[9], with_metadata=True)
    members = [member for number in range(9) for member in sample(number, with_metadata=True)]
    changed = [(name, content if name == "s0000003.npy" else old) for name, old in members]
    write_tar(tmp_path / "test" / "0.tar", [member for member in changed if member[1] is not None])
    assert expected in refusal(tmp_path)


def test_metadata_may_be_stored_as_different_kinds_of_whole_numbers(tmp_path):
    write_task(tmp_path, sizes=[3])
    members = []
    for number, kind in enumerate(["int64", ">i4", "uint8"]):
        stream = io.BytesIO()
        np.save(stream, np.array([number, 200], dtype=kind))
        members += [*sample(number), (f"s{number:07d}.npy", stream.getvalue())]
    write_tar(tmp_path / "test" / "0.tar", members)
    metadata = ZeroShotTask.open(tmp_path).metadata
    assert metadata.dtype == np.int64 and metadata.tolist() == [[0, 200], [1, 200], [2, 200]]


def test_train_beside_test_is_not_read(tmp_path):
    write_task(tmp_path, sizes=[5])
    write_tar(tmp_path / "train" / "0.tar", sample(1))
    (tmp_path / "train" / "nshards.txt").write_text("1")
    assert len(ZeroShotTask.open(tmp_path).source) == 5


def test_a_blank_class_name_keeps_its_label(tmp_path):
    task = ZeroShotTask.open(write_task(tmp_path))
    assert len(task.classnames) == 6 and "" in task.classnames


def test_a_set_without_templates_gets_the_default_ones_and_says_so(tmp_path, capsys):
    assert ZeroShotTask.open(write_task(tmp_path, templates=None)).templates == list(DEFAULT_TEMPLATES)
    assert DEFAULT_TEMPLATES[0] in capsys.readouterr().err


def test_shards_are_read_in_the_order_of_their_numbers(tmp_path):
    task = ZeroShotTask.open(write_task(tmp_path, sizes=[1] * 11))
    assert task.labels == [number % 6 for number in range(11)]  # not 0.tar, 1.tar, 10.tar, 2.tar


def spoil(folder, how):
    test = folder / "test"
    match how:
        case "cut off":
            (test / "1.tar").write_bytes((test / "1.tar").read_bytes()[:-11_000])
        case "cut between members":
            (test / "1.tar").write_bytes((test / "1.tar").read_bytes()[: 3 * 4 * 512])
        case "too many promised":
            (test / "nshards.txt").write_text("3\n")
        case "too few promised":
            (test / "nshards.txt").write_text("1\n")
        case "no number":
            (test / "nshards.txt").write_text("two\n")
        case "no nshards":
            (test / "nshards.txt").unlink()
        case "no names":
            (folder / "classnames.txt").unlink()
        case "empty names":
            (folder / "classnames.txt").write_text("\n")
        case "too few names":
            (folder / "classnames.txt").write_text("cat\ndog\n")
        case "retrieval":
            (folder / "dataset_type.txt").write_text("retrieval\n")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("cut off", "test/1.tar at byte"),
        ("cut between members", "test/1.tar at byte"),
        ("too many promised", "test/2.tar: missing, though"),
        ("too few promised", "test/1.tar: is not among the 1 shards"),
        ("no number", "nshards.txt: 'two' is not a number"),
        ("no nshards", "nshards.txt: no such file, and without it nobody knows whether shards are missing"),
        ("no names", "classnames.txt: no such file; write one class name per line"),
        ("empty names", "classnames.txt: the file is empty"),
        ("too few names", "0.tar: s0000002.png: label 2, but"),
        ("retrieval", "give it as retrieval data"),
    ],
)
def test_an_incomplete_webdataset_is_one_line_with_its_file(tmp_path, how, expected):
    spoil(write_task(tmp_path), how)
    assert expected in refusal(tmp_path)


def test_class_folders_are_classes_in_the_order_of_their_names(tmp_path):
    write_class_folders(tmp_path, golden_retriever=2, cat=3, empty=0)
    (tmp_path / "cat" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "cat" / "deep" / "er" / "a.jpg").write_bytes(image_bytes(9, "jpg"))
    task = ZeroShotTask.open(tmp_path)
    assert task.classnames == ["cat", "empty", "golden retriever"]
    assert task.labels == [0, 0, 0, 0, 2, 2] and task.templates == list(DEFAULT_TEMPLATES)
    assert [task.source.where(id) for id in (3, 4)] == [
        str(tmp_path / "cat" / "deep" / "er" / "a.jpg"),
        str(tmp_path / "golden_retriever" / "000.png"),
    ]
    assert task.source[3].image == image_bytes(9, "jpg") and task.source[3].captions == ()


def test_class_folders_take_names_and_templates_from_files_beside_them(tmp_path, capsys):
    write_class_folders(tmp_path, n02=1, n01=1)
    (tmp_path / "classnames.txt").write_text("tench\ngoldfish\n")
    (tmp_path / "zeroshot_classification_templates.txt").write_text("the {c}\n")
    task = ZeroShotTask.open(tmp_path)
    assert (task.classnames, task.templates, task.labels) == (["tench", "goldfish"], ["the {c}"], [0, 1])
    assert task.source.where(0).endswith("n01/001.png") and "line 1 names the class of n01" in capsys.readouterr().err
    (tmp_path / "classnames.txt").write_text("tench\n")
    assert "1 class name for 2 class folders" in refusal(tmp_path)


def test_test_alone_is_used_and_a_choice_of_parts_is_refused(tmp_path):
    write_class_folders(tmp_path / "test", cat=1, dog=2)
    (tmp_path / "classnames.txt").write_text("kitten\npuppy\n")
    assert ZeroShotTask.open(tmp_path).classnames == ["kitten", "puppy"]
    (tmp_path / "train").mkdir()
    assert f"holds the parts test, train; give one of them, such as {tmp_path}/test" in refusal(tmp_path)
    assert ZeroShotTask.open(tmp_path / "test").labels == [0, 1, 1]


def test_train_beside_other_names_is_a_class(tmp_path):
    assert ZeroShotTask.open(write_class_folders(tmp_path, bus=1, train=1)).classnames == ["bus", "train"]


def test_images_outside_of_class_folders_are_counted(tmp_path):
    write_class_folders(tmp_path, cat=1, dog=1)
    (tmp_path / "a.png").write_bytes(image_bytes(5))
    (tmp_path / "cat" / "b.heic").write_bytes(b"x")
    task = ZeroShotTask.open(tmp_path)
    assert len(task.source) == 2
    assert [fault.reason for fault in task.source.faults] == ["lies in no class folder", "kind of image is not read"]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, "neither class folders with images nor test/0.tar"),
        ({"cat": 0, "dog": 0}, "neither class folders with images nor test/0.tar"),
        ({"images": 3}, "has a single class folder, images"),
    ],
)
def test_a_folder_that_cannot_be_classified_is_one_line(tmp_path, counts, expected):
    assert expected in refusal(write_class_folders(tmp_path, **counts))


def test_the_folder_of_the_shards_alone_is_answered_with_its_parent(tmp_path):
    write_task(tmp_path / "set", sizes=[1])
    assert f"did you mean {tmp_path / 'set'}?" in refusal(tmp_path / "set" / "test")


def test_class_names_are_cut_at_line_feeds_alone(tmp_path):
    write_task(tmp_path, sizes=[2])
    (tmp_path / "classnames.txt").write_bytes("\ufeffcat\r\nsea\u2028horse\r\n".encode())
    assert ZeroShotTask.open(tmp_path).classnames == ["cat", "sea\u2028horse"]


def test_a_missing_folder_is_answered_with_the_nearest(tmp_path):
    write_task(tmp_path / "wds_vtab-dtd_test", sizes=[1])
    assert f"did you mean {tmp_path}/wds_vtab-dtd_test?" in refusal(tmp_path / "wds_vtab-dtd-test")


def test_images_of_class_folders_travel_to_data_workers_and_broken_ones_are_counted(tmp_path):
    write_class_folders(tmp_path, cat=2, dog=2)
    (tmp_path / "dog" / "003.png").write_bytes(b"no image")
    task = ZeroShotTask.open(tmp_path)
    copy = pickle.loads(pickle.dumps(task.source))
    assert [copy[id].image for id in range(4)] == [task.source[id].image for id in range(4)]
    figures, faults = evaluate_task(colour_embedder(batch_size=2), task)
    assert (figures["images"], figures["classes"]) == (3, 2)
    assert [(fault.id, fault.reason) for fault in faults] == [(3, "image does not decode")]
