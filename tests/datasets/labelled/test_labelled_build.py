from __future__ import annotations

import gzip
import json
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from neuclip.data.held_out import ZeroShotTask
from neuclip.datasets.fetching import packages_folder
from neuclip.datasets.labelled.build import first_of_each_class
from neuclip.datasets.prepared import dataset_folder
from neuclip.errors import RunFailed

ROWS = [([number % 17] * 64, number % 10) for number in range(30)]


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path))
    packages_folder().mkdir()


def put_digits(lines: list[str]) -> Path:
    """A wheel of scikit-learn with nothing in it but these digits."""
    path = packages_folder() / "scikit_learn-1.9.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("sklearn/datasets/data/digits.csv.gz", gzip.compress("\n".join(lines).encode()))
    return path


def as_lines(rows) -> list[str]:
    return [",".join(map(str, [*values, label])) for values, label in rows]


def test_a_prepared_set_is_a_zero_shot_task(capsys):
    put_digits(as_lines(ROWS))
    folder = dataset_folder("digits")
    task = ZeroShotTask.open("digits")
    assert task.labels == [label for _, label in ROWS]
    assert task.classnames[:3] == ["zero", "one", "two"] and task.templates == ["a drawing of a {c}"]
    assert (folder / "README.md").read_text().startswith("# digits\n\n30 test images in 10 classes (3 per class)")
    assert "warning: digits has 30 images instead of 1,797" in capsys.readouterr().err


def test_malformed_rows_are_left_out_and_counted():
    put_digits([*as_lines(ROWS), "1,2,3", ",".join(["0"] * 64 + ["12"]), ",".join(["99"] * 64 + ["1"])])
    built = json.loads((dataset_folder("digits") / "BUILD.json").read_text())
    assert built["left_out"] == {"no such label": 1, "not an image": 2}
    assert built["images"] == 30 and built["classes"]["nine"] == 3
    assert built["packages"] == {"scikit-learn": "1.9.1"}


def test_two_builds_give_the_same_bytes(monkeypatch, tmp_path):
    built = []
    for cache in ("first", "second"):
        monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / cache))
        packages_folder().mkdir(parents=True)
        put_digits(as_lines(ROWS))
        folder = dataset_folder("digits")
        built.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    assert built[0] == built[1] and len(built[0]) == 6


@pytest.mark.parametrize("lines", [[], ["no", "digits"]])
def test_a_package_without_images_is_one_line(lines):
    put_digits(lines)
    with pytest.raises(RunFailed, match=r"^digits: scikit_learn-1\.9\.1-\*\.whl does not hold .*\(no images\); delete"):
        dataset_folder("digits")


def test_the_test_part_depends_on_pixels_alone():
    rng = np.random.default_rng(0)
    rows = [(number % 3, rng.integers(0, 256, (4, 4), dtype=np.uint8)) for number in range(60)]
    chosen = first_of_each_class(rows, 5)
    assert Counter(label for label, _ in chosen) == {0: 5, 1: 5, 2: 5}
    again = first_of_each_class([*reversed(rows), *rows], 5)
    assert [pixels.tobytes() for _, pixels in chosen] == [pixels.tobytes() for _, pixels in again]
    assert len({pixels.tobytes() for _, pixels in again}) == 15
