"""CLIP_benchmark's retrieval sets: a mark makes every line a caption, and a set that is not whole is never scored."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from neuclip.data.fingerprint import count_captions, fingerprint
from neuclip.data.sample import BadSample

from neuclip.data.held_out import HeldOutSets, open_retrieval
from neuclip.data.open import open_source
from neuclip.errors import UserError
from neuclip.settings.sections import DataSettings, EvaluationSettings, Settings
from tests.data.small_shards import image_bytes, write_tar
from tests.data.small_tables import write_images

SETTINGS = Settings()


def text(number: int) -> str:
    """Captions of image `number`, one per line; some sets end the last line and some do not."""
    return "\n".join(f"caption {k} of image {number}" for k in range(4 + number % 3)) + "\n" * (number % 2)


def captions(number: int) -> tuple[str, ...]:
    return tuple(text(number).splitlines())


def mark(folder: Path, word: str = "retrieval\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset_type.txt").write_text(word)
    return folder


def write_set(folder: Path, sizes: tuple[int, ...] = (4, 3)) -> Path:
    """As clip_benchmark's exporter writes it."""
    first = 0
    for shard, size in enumerate(sizes):
        members = [
            member
            for number in range(first, first + size)
            for member in ((f"s{number:07d}.webp", image_bytes(number, "webp")), (f"s{number:07d}.txt", text(number)))
        ]
        encoded = [(name, content.encode() if isinstance(content, str) else content) for name, content in members]
        write_tar(folder / "test" / f"{shard}.tar", encoded)
        first += size
    (folder / "test" / "nshards.txt").write_text(f"{len(sizes)}\n")
    return mark(folder)


def refusal(address: object) -> str:
    with pytest.raises(UserError) as caught:
        open_retrieval(str(address), SETTINGS)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("address", ["{}", "{}/test", "{}/test/*.tar", "{}/test/{{0,1}}.tar"])
def test_each_line_is_a_caption_whether_the_set_its_test_part_or_its_shards_are_given(tmp_path, address):
    folder = write_set(tmp_path / "wds_flickr30k")
    source = open_retrieval(address.format(folder), SETTINGS)
    assert [source[id].captions for id in range(7)] == [captions(number) for number in range(7)]
    assert str(count_captions(source)) == "7 samples with 34 captions (4 to 6 each)"  # 4 5 6 4 5 6 4


def test_the_test_part_is_measured_beside_a_training_part_and_other_keys_of_the_run_do_not_hold(tmp_path):
    folder = write_set(tmp_path / "set")
    write_tar(folder / "train" / "0.tar", [("0.png", image_bytes(0)), ("0.txt", b"to train on")])
    settings = Settings(data=DataSettings(caption_key="alt"))
    assert len(open_retrieval(str(folder), settings)) == 7
    with pytest.raises(UserError, match="holds the parts test, train"):
        open_source(str(folder))
    assert open_source(str(folder / "train"))[0].captions == ("to train on",)


def test_without_the_mark_a_text_stays_one_caption_and_a_line_says_so_once(tmp_path, capsys):
    folder = write_set(tmp_path / "set")
    marked = fingerprint(open_source(str(folder)))
    (folder / "dataset_type.txt").write_text("classification")
    whole = fingerprint(open_source(str(folder)))
    for _ in range(2):
        source = open_retrieval(str(folder), SETTINGS)
    assert source[0].captions == (text(0).strip(),) and whole != marked
    message = "the texts of 7 of 7 images have several lines and are read as one caption each; if every line is"
    assert capsys.readouterr().err.count(message) == 1
    mark(folder)  # the stored indexes of both meanings live side by side
    assert fingerprint(open_source(str(folder))) == marked
    (folder / "dataset_type.txt").unlink()
    assert fingerprint(open_source(str(folder))) == whole


def test_packed_shards_and_shards_marked_beside_them_are_read_by_lines(tmp_path):
    plain = write_set(tmp_path / "set") / "test" / "0.tar"
    (mark(tmp_path / "packed") / "0.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert open_retrieval(str(tmp_path / "packed"), SETTINGS)[3].captions == captions(3)
    plain.rename(mark(tmp_path / "flat") / "own-name.tar")
    assert open_retrieval(str(tmp_path / "flat"), SETTINGS)[3].captions == captions(3)


def test_marked_and_other_shards_are_not_one_source(tmp_path):
    folder = write_set(tmp_path / "set")
    other = write_tar(tmp_path / "other" / "0.tar", [("0.png", image_bytes(0)), ("0.txt", b"a\nb")])
    (tmp_path / "list.txt").write_text(f"{folder}/test\n{other}\n")
    assert "their texts are read differently: give them between commas" in refusal(tmp_path / "list.txt")
    assert [len(open_retrieval(f"{folder}/test,{other}", SETTINGS)[id].captions) for id in (0, 7)] == [4, 1]


def test_a_marked_folder_of_images_has_one_caption_per_line(tmp_path, capsys):
    folder = write_images(tmp_path / "photos", 3, txt=b"one {}\r\ntwo {}\n\n")
    assert open_retrieval(str(folder), SETTINGS)[2].captions == ("one 2\r\ntwo 2",)
    assert "the texts of 3 of 3 images have several lines" in capsys.readouterr().err
    source = open_retrieval(str(mark(folder)), SETTINGS)
    assert source[2].captions == ("one 2", "two 2") and source.faults == ()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda test: (test / "1.tar").unlink(), r"test/1.tar: missing, though .*nshards.txt says 2 shards; copy it"),
        (lambda test: (test / "nshards.txt").unlink(), r"nshards.txt: no such file.*copy the set again.*2 are there"),
        (lambda test: (test / "nshards.txt").write_text("1"), r"1.tar: is not among the 1 shards"),
        (lambda test: (test / "nshards.txt").write_text("two"), r"nshards.txt: 'two' is not a number of shards; write"),
        (lambda test: [shard.unlink() for shard in test.glob("*.tar")], r"test/0.tar: missing"),
        (
            lambda test: (test / "1.tar").write_bytes((test / "1.tar").read_bytes()[:2000]),
            r"test/1.tar at byte \d+: shard is cut off; figures on a part of a set cannot be compared: copy it again",
        ),
    ],
)
@pytest.mark.parametrize("address", ["set", "set/test"])
def test_a_set_that_is_not_whole_is_refused_in_one_line(tmp_path, spoil, message, address):
    spoil(write_set(tmp_path / "set") / "test")
    with pytest.raises(UserError, match=message) as caught:
        open_retrieval(str(tmp_path / address), SETTINGS)
    assert "\n" not in str(caught.value)


def test_images_without_a_caption_are_told_and_stay_bad_samples(tmp_path, capsys):
    shard = [("0.png", image_bytes(0)), ("0.txt", b"a\nb"), ("1.png", image_bytes(1)), ("2.png", image_bytes(2))]
    write_tar(mark(tmp_path / "set") / "0.tar", [*shard, ("2.txt", b" \n\n")])
    (source,) = HeldOutSets.open(
        Settings(evaluation=EvaluationSettings(retrieval=(str(tmp_path / "set"),), zero_shot=()))
    ).retrieval.values()
    assert "2 of 3 images have no caption and are skipped; give each of them one" in capsys.readouterr().err
    for id in (1, 2):
        with pytest.raises(BadSample, match="caption is"):
            source[id]
