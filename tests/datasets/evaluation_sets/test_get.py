from __future__ import annotations

import json
import tarfile

import pytest

from neuclip.cli.main import main
from neuclip.data.task_sets import ZeroShotTask, read_puzzles
from neuclip.datasets.evaluation_sets import layouts
from neuclip.datasets.evaluation_sets.get import get_from_disk
from neuclip.errors import UserError
from neuclip.tasks import choose_tasks, find_task
from tests.builders.data import (
    PUZZLES,
    image_bytes,
    write_class_folders,
    write_puzzle_images,
    write_puzzle_table,
    write_task,
)

TEXTURES = find_task("dtd")


def get_one(name, place, root):
    (got,) = get_from_disk(choose_tasks(name), place, root)
    return got


def shard_members(path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def test_a_folder_in_the_layout_is_linked_and_its_counts_are_told(tmp_path):
    place = write_task(tmp_path / "clone", sizes=[5, 2], with_metadata=True)
    got = get_one("fmow", place, tmp_path / "sets")
    assert (got.folder, got.how) == (tmp_path / "sets" / "wds_wilds-fmow_test", "copied")
    assert got.counts == {"images": 7, "classes": 6}
    assert got.notes == ("7 images, the task has 22,108", "6 classes, the task has 62")
    assert ZeroShotTask.open(got.folder).metadata.shape == (7, 4)
    assert (got.folder / "test" / "0.tar").samefile(place / "test" / "0.tar")
    assert json.loads((got.folder / "SOURCE.json").read_bytes())["from"] == {"folder": str(place)}


def test_links_of_the_hubs_cache_are_followed(tmp_path):
    place = write_task(tmp_path / "snapshot", sizes=[3])
    blob = tmp_path / "blob"
    (place / "test" / "0.tar").rename(blob)
    (place / "test" / "0.tar").symlink_to(blob)
    got = get_one("dtd", place, tmp_path / "sets")
    assert not (got.folder / "test" / "0.tar").is_symlink() and len(ZeroShotTask.open(got.folder).source) == 3


def test_metadata_that_a_task_needs_are_missed(tmp_path):
    got = get_one("geode", write_task(tmp_path / "clone", sizes=[3]), tmp_path / "sets")
    assert "0 numbers per image in npy members, the task has region, country" in got.notes


def test_class_folders_become_a_webdataset_with_the_same_images_and_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(layouts, "SHARD_SAMPLES", 4)
    place = write_class_folders(tmp_path / "photos", cat=3, sea_horse=4)
    (place / "zeroshot_classification_templates.txt").write_text("one {c}\n")
    before, got = ZeroShotTask.open(place), get_one("dtd", place, tmp_path / "sets")
    after = ZeroShotTask.open(got.folder)
    assert got.how == "converted" and (got.folder / "test" / "nshards.txt").read_text() == "2\n"
    assert (after.classnames, after.templates, after.labels) == (["cat", "sea horse"], ["one {c}"], [0] * 3 + [1] * 4)
    assert [after.source[id].image for id in range(7)] == [before.source[id].image for id in range(7)]


def test_default_templates_are_not_written_but_told(tmp_path):
    got = get_one("dtd", write_class_folders(tmp_path / "photos", cat=1, dog=1), tmp_path / "sets")
    assert not (got.folder / "zeroshot_classification_templates.txt").exists()
    assert any("prompts are the default ones" in note for note in got.notes)
    assert "no classnames.txt: class names are those of the folders" in got.notes


def test_images_that_cannot_be_read_are_left_out_and_told(tmp_path):
    place = write_class_folders(tmp_path / "photos", cat=2, dog=1)
    (place / "cat" / "gone.png").symlink_to(tmp_path / "nowhere")
    got = get_one("dtd", place, tmp_path / "sets")
    assert got.counts["images"] == 3 and "1 image left out: image file cannot be read" in got.notes


def write_captions(folder):
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(image_bytes(number))
    rows = ["image,caption", "0.png,one", '0.png,"eins\nuno"', "2.png,three", "1.png,two", "1.png,zwei"]
    (folder / "captions.csv").write_text("\n".join(rows) + "\n")
    return folder


def test_captions_beside_images_become_a_retrieval_webdataset_with_one_caption_per_line(tmp_path):
    got = get_one("flickr", write_captions(tmp_path / "flickr30k"), tmp_path / "sets")
    assert got.folder == tmp_path / "sets" / "wds_flickr30k_test"
    assert (got.folder / "dataset_type.txt").read_text() == "retrieval\n"
    members = shard_members(got.folder / "test" / "0.tar")
    assert [members[f"{number:08d}.txt"] for number in range(3)] == [b"one\neins uno", b"two\nzwei", b"three"]
    assert members["00000001.png"] == image_bytes(1)
    assert got.notes == ("3 images, the task has 1,000",)


def test_karpathys_test_split_becomes_a_retrieval_webdataset(tmp_path):
    pytest.importorskip("neuclip.data.tables.karpathy")
    place = tmp_path / "flickr30k"
    (place / "images").mkdir(parents=True)
    entries = []
    for number, split in enumerate(["test", "train", "test"]):
        (place / "images" / f"{number}.jpg").write_bytes(image_bytes(number, "jpg"))
        sentences = [{"raw": f"photo {number} {k}"} for k in range(5)]
        entries.append({"filename": f"{number}.jpg", "split": split, "sentences": sentences})
    (place / "dataset_flickr30k.json").write_text(json.dumps({"images": entries, "dataset": "flickr30k"}))
    got = get_one("flickr", place, tmp_path / "sets")
    assert got.counts["images"] == 2
    texts = [text for name, text in shard_members(got.folder / "test" / "0.tar").items() if name.endswith("txt")]
    assert texts == [b"\n".join(b"photo %d %d" % (number, k) for k in range(5)) for number in (0, 2)]


def test_winogavils_table_and_images_become_the_same_puzzles(tmp_path):
    place = tmp_path / "download"
    write_puzzle_images(place)
    (place / "unused.jpg").write_bytes(image_bytes(9, "jpg"))
    write_puzzle_table(place / "winogavil_dataset.csv", PUZZLES, repr)
    got = get_one("winogavil", place, tmp_path / "sets")
    before, after = read_puzzles(place), read_puzzles(got.folder)
    assert after.puzzles == before.puzzles and got.counts == {"images": 6, "puzzles": 2}
    assert [after.source[id].image for id in range(6)] == [before.source[id].image for id in range(6)]
    assert not (got.folder / "images" / "unused.jpg").exists()


def test_a_broken_source_leaves_nothing_behind(tmp_path):
    place = write_task(tmp_path / "clone", sizes=[5, 2])
    (place / "test" / "1.tar").unlink()
    with pytest.raises(UserError, match=r"clone/test/1\.tar: missing"):
        get_one("dtd", place, tmp_path / "sets")
    assert not (tmp_path / "sets").exists()


def test_what_an_interrupted_call_left_is_made_anew(tmp_path):
    left = tmp_path / "sets" / f".{TEXTURES.folder}.partial"
    left.mkdir(parents=True)
    (left / "half").write_text("x")
    got = get_one("dtd", write_task(tmp_path / "clone", sizes=[2]), tmp_path / "sets")
    assert not left.exists() and not (got.folder / "half").exists()


def test_a_set_that_is_there_stays_and_a_broken_one_is_told(tmp_path):
    root = tmp_path / "sets"
    write_task(root / TEXTURES.folder, sizes=[2])
    assert get_one("dtd", write_task(tmp_path / "clone", sizes=[4]), root).counts["images"] == 2
    (root / TEXTURES.folder / "test" / "0.tar").unlink()
    with pytest.raises(UserError, match=rf"0\.tar: missing.* remove {root / TEXTURES.folder} to get it again"):
        get_one("dtd", tmp_path / "clone", root)


def test_several_tasks_are_found_under_their_usual_names_and_missing_ones_are_told(tmp_path, capsys):
    write_task(tmp_path / "down" / TEXTURES.folder, sizes=[2])
    write_task(tmp_path / "down" / "wds_cars", sizes=[3])
    arguments = ["--from", str(tmp_path / "down"), "--to", str(tmp_path / "sets")]
    assert main(["data", "get", "dtd", "cars", "mnist", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [str(tmp_path / "sets" / name) for name in (TEXTURES.folder, "wds_cars_test")]
    assert f"MNIST: not in {tmp_path / 'down'}, as none of wds_mnist_test, wds_mnist" in err


def test_a_root_inside_of_the_source_is_refused(tmp_path):
    place = write_class_folders(tmp_path / "photos", cat=1, dog=1)
    with pytest.raises(UserError, match="lies inside of"):
        get_one("dtd", place, place / "sets")


def test_the_list_shows_all_tasks_and_which_are_there(tmp_path, capsys):
    write_task(tmp_path / TEXTURES.folder, sizes=[1])
    assert main(["data", "get", "--list", "--to", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 38 and f"1 of 38 in {tmp_path}" in err
    assert next(line for line in out.splitlines() if "there" in line).startswith("Describable Textures")
    assert max(map(len, out.splitlines())) <= 120
    assert main(["data", "get", "imagenet", "--list", "--to", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == 7 and listed[0]["size"] == 50_000 and listed[0]["folder"] is None


def test_an_unknown_task_or_none_is_one_line(tmp_path, capsys):
    assert main(["data", "get", "imagenet-v2"]) == 2 and "did you mean imagenetv2?" in capsys.readouterr().err
    assert main(["data", "get"]) == 2 and "give datacomp for all" in capsys.readouterr().err
    assert main(["data", "get", "dtd", "--from", str(tmp_path / "nowhere")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
