from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from neuclip.data.convert import write_tar
from neuclip.data.open import open_source
from neuclip.datasets import rasteriser, writing
from neuclip.datasets.fetching import Package
from neuclip.datasets.iconify import build as building
from neuclip.datasets.iconify.build import build
from neuclip.datasets.iconify.notes import what_it_asks
from neuclip.datasets.sets import ICONIFY
from neuclip.datasets.splitting import PARTS, heldout_concepts
from neuclip.errors import UserError

pytest.importorskip("resvg_py", reason="needs pip install 'neuclip[demo]'")

PACKAGE = Package("npm", "@iconify/json", "0.0.1", 1)  # as in conftest.py


def samples(folder: Path) -> list[tuple[dict, dict[str, bytes]]]:
    """(JSON, members by extension) of every sample of a part."""
    all_samples = []
    for shard in sorted(folder.glob("*.tar")):
        by_key: dict[str, dict[str, bytes]] = {}
        with tarfile.open(shard) as tar:
            for member in tar:
                key, extension = member.name.split(".")
                by_key.setdefault(key, {})[extension] = tar.extractfile(member).read()
        all_samples += [(json.loads(members["json"]), members) for members in by_key.values()]
    return all_samples


def names_of(folder: Path) -> dict[str, set[str]]:
    return {part: {f"{about['set']}/{about['name']}" for about, _ in samples(folder / part)} for part in PARTS}


def files_and_hashes(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_every_drawing_is_in_one_part_or_left_out_for_a_reason(built):
    parts = names_of(built)
    everything = sorted(name for names in parts.values() for name in names)
    assert len(everything) == len(set(everything))
    assert "alpha/house" in everything and "alpha/copy-of-the-house" not in everything, "equal: the shortest name stays"
    assert not {"alpha/brand-acme", "alpha/empty", "alpha/42", "alpha/secret"} & set(everything)
    # "cat" is a held-out word, and alpha's cat is nearly the image that is trained on as "feline".
    assert parts["new-concepts"] == {"beta/cat", "gamma/cat", "delta/cat"} and "alpha/feline" in parts["train"]
    about = json.loads((built / "BUILD.json").read_text())
    assert about["icons"] == {"brands": 1, "unnamed": 1, "blank": 1, "drawn": 35}
    assert sum(about["pairs"].values()) + sum(about["dropped"].values()) == about["icons"]["drawn"]
    assert about["pairs"] == {part: len(names) for part, names in parts.items()}


def test_a_held_out_drawing_is_trained_on_in_other_families_only(built):
    parts = names_of(built)
    assert parts["new-drawings"]
    for name in parts["new-drawings"]:
        family, _, thing = name.partition("/")
        assert not {trained for trained in parts["train"] if trained.startswith(f"{family}/{thing}")}
        assert len([trained for trained in parts["train"] if trained.endswith(f"/{thing}")]) >= 2


def test_a_sample_says_where_it_comes_from_and_is_read_by_training(built, tmp_path):
    for index, (about, members) in enumerate(samples(built / "train")):
        assert about["index"] == index and about["license"] == "MIT" and about["category"] == "UI 24px"
        pixels = np.asarray(Image.open(io.BytesIO(members["png"])))
        assert pixels.shape == (64, 64, 3) and (pixels[0, 0] == 255).all()
    shutil.copytree(built / "train", tmp_path / "train")  # because an index is written beside the shards
    source = open_source(str(tmp_path / "train"))
    captions = {source[id].captions for id in range(len(source))}
    assert not source.faults and {("bell",), ("feline",)} <= captions
    everywhere = [about for part in PARTS for about, _ in samples(built / part)]
    assert {about["style"] for about in everywhere if about["name"] == "key-fill"} <= {"fill"}


def test_a_second_name_is_a_second_caption_without_held_out_words(package, tmp_path):
    file = package / "json" / "alpha.json"
    content = json.loads(file.read_text())
    content["aliases"] |= {"villa": {"parent": "house"}, "cat-door": {"parent": "house"}, "tomcat": {"parent": "cat"}}
    file.write_text(json.dumps(content))
    build(tmp_path / "set", PACKAGE, package, processes=1)
    captions = {}
    for part in PARTS:
        source = open_source(str(tmp_path / "set" / part))
        for id, (about, _) in enumerate(samples(tmp_path / "set" / part)):
            captions[f"{about['set']}/{about['name']}"] = source[id].captions
    assert captions["alpha/house"] == ("house", "home", "villa"), "a cat door would give a held-out word away"
    assert captions["beta/house"] == ("house",) and "cat" in heldout_concepts()


def test_two_builds_give_the_same_files_with_any_number_of_processes(package, built, tmp_path):
    build(tmp_path / "second", PACKAGE, package, processes=2)
    first = files_and_hashes(built)
    assert first == files_and_hashes(tmp_path / "second")
    assert set(first) == {"README.md", "BUILD.json", *(f"{part}/00000.tar" for part in PARTS)}, "nothing is left over"


CHILD = """
import os, signal, sys
from pathlib import Path
from neuclip.datasets.fetching import Package
from neuclip.datasets import drawn
from neuclip.datasets.iconify.build import build

def store_two_and_die(file, *rest):
    if file.stem == "gamma":
        file.with_suffix(".partial").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    store(file, *rest)

store, drawn._store = drawn._store, store_two_and_die
build(Path(sys.argv[1]), Package("npm", "@iconify/json", "0.0.1", 1), Path(sys.argv[2]), processes=1)
"""


def test_a_build_killed_while_drawing_continues_with_the_collections_that_are_missing(package, built, tmp_path, capsys):
    folder = tmp_path / "killed"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", CHILD, str(folder), str(package)], env=environment, check=False)
    assert child.returncode == -signal.SIGKILL
    drawn = {path.name: path.stat().st_mtime_ns for path in (folder / "drawn").glob("*.npz")}
    assert set(drawn) == {"alpha.npz", "beta.npz"}
    for prefix in ("alpha", "beta"):  # what is drawn is not even read again
        (package / "json" / f"{prefix}.json").rename(tmp_path / f"{prefix}.json")
    build(folder, PACKAGE, package, processes=1)
    assert "2 of 4 collections are already drawn" in capsys.readouterr().err
    assert files_and_hashes(folder) == files_and_hashes(built)


def flip_a_byte(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-9], flip_a_byte])
def test_a_drawn_collection_that_is_damaged_is_drawn_again(package, built, tmp_path, monkeypatch, damage):
    with monkeypatch.context() as patch:
        patch.setattr(building, "split_all", None)
        with pytest.raises(TypeError):
            build(tmp_path / "set", PACKAGE, package, processes=1)
    drawn = tmp_path / "set" / "drawn" / "beta.npz"
    drawn.write_bytes(damage(drawn.read_bytes()))
    build(tmp_path / "set", PACKAGE, package, processes=1)
    assert files_and_hashes(tmp_path / "set") == files_and_hashes(built)


def test_a_build_stopped_while_writing_continues_with_the_parts_that_are_missing(package, built, tmp_path, monkeypatch):
    folder, written = tmp_path / "stopped", []

    def write_two_and_stop(path, samples):
        if len(written) == 1:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path)
        write_tar(path, samples)

    def write_shards(part, entries):
        part.mkdir()
        write_two_and_stop(part / "00000.tar", enumerate(entries))

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_shards", write_shards)
        with pytest.raises(KeyboardInterrupt):
            build(folder, PACKAGE, package, processes=1)
    assert (folder / "train").is_dir() and not (folder / "new-drawings").exists()
    before = (folder / "train" / "00000.tar").stat().st_mtime_ns
    build(folder, PACKAGE, package, processes=1)
    assert (folder / "train" / "00000.tar").stat().st_mtime_ns == before
    assert files_and_hashes(folder) == files_and_hashes(built)


def test_a_finished_build_that_was_not_cleaned_up_is_only_cleaned_up(package, built, tmp_path, monkeypatch):
    shutil.copytree(built, tmp_path / "set")
    before = files_and_hashes(tmp_path / "set")
    (tmp_path / "set" / "drawn").mkdir()
    (tmp_path / "set" / "drawn" / "alpha.npz").write_bytes(b"")
    monkeypatch.setattr(building, "draw_collections", None)
    build(tmp_path / "set", PACKAGE, package)
    assert files_and_hashes(tmp_path / "set") == before


def test_the_readme_names_every_licence_and_collection(built):
    text = (built / "README.md").read_text(encoding="utf-8")
    assert "@iconify/json 0.0.1" in text and "| MIT | " in text and what_it_asks("MIT") in text
    for prefix in ("alpha", "beta", "gamma", "delta"):
        assert f"[Author of {prefix}](https://{prefix}.example)" in text
    assert not [line for line in text.splitlines() if line.startswith(("| marks", "| bought", "| fa-brands"))]


@pytest.mark.parametrize(
    ("licence", "word"),
    [("CC-BY-SA-4.0", "under this licence"), ("CC-BY-3.0", "name the author"), ("GPL-3.0-or-later", "same licence")],
)
def test_what_a_licence_asks_is_said_for_every_kind(licence, word):
    assert word in what_it_asks(licence)


def test_without_the_rasteriser_the_message_says_what_to_install(package, tmp_path, monkeypatch):
    monkeypatch.setattr(rasteriser, "RASTERISER_MODULE", "not_there_resvg")
    with pytest.raises(UserError, match=r"pip install 'neuclip\[demo\]'"):
        build(tmp_path / "set", PACKAGE, package)
    assert not (tmp_path / "set").exists()


def test_the_catalogue_names_the_parts_that_are_built():
    assert ICONIFY.parts == PARTS
