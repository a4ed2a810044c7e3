"""Each image is embedded once; the index follows the folder, survives interruptions, and is made again when damaged."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from neuclip.errors import RunFailed, UserError
from neuclip.search import index
from neuclip.search.index import Folder, Searcher
from tests.builders.images import image_bytes


def searched(built, photos: Path, before: Callable[..., None] = lambda number, image: None) -> tuple[Searcher, int]:
    """And how many images were embedded for it. `before(number, image)` is called before each of them."""
    calls = 0

    def transform(image):
        nonlocal calls
        calls += 1
        before(calls, image)
        return built.transform(image)

    return Searcher.open("tiny", replace(built, transform=transform), Folder.open(photos)), calls


@torch.no_grad()
def expected(built, folder: Folder) -> np.ndarray:
    """Image by image through open_clip's own transform."""
    built.towers.eval()
    images = [Image.open(folder.path / file.path) for file in folder.files]
    return torch.cat([built.towers.encode_image(built.float_transform(image)[None]) for image in images]).numpy()


def stored_file() -> Path:
    (file,) = Path(os.environ["NEUCLIP_CACHE"], "search").glob("[!.]*")  # what is being written begins with a dot
    return file


def test_the_best_matches_come_first_by_brute_force(built, photos):
    searcher, calls = searched(built, photos)
    features = expected(built, searcher.folder)
    assert calls == 12 and len(searcher.ids) == 12
    with torch.no_grad():
        query = built.towers.encode_text(built.tokenize(["a blue bar"]))[0].double().numpy()
    cosines = features.astype(np.float64) @ query
    matches = searcher.by_text("a blue bar", top=5)
    assert [match.id for match in matches] == np.argsort(-cosines)[:5].tolist()
    np.testing.assert_allclose([match.score for match in matches], np.sort(cosines)[::-1][:5], atol=1e-5)
    assert [searcher.folder.files[match.id].path for match in matches] == [match.path for match in matches]
    own = searcher.by_image(searcher.folder.read(7), top=1)
    assert own[0].id == 7 and own[0].score == pytest.approx(1, abs=1e-5)


def test_equal_images_come_in_order_of_their_paths(built, tmp_path):
    names = [f"{number:02d}.png" for number in range(40)]  # a sort of few would keep their order by itself
    for name in names[::-1]:
        (tmp_path / name).write_bytes(image_bytes(3))
    assert [match.path for match in searched(built, tmp_path)[0].by_text("x", top=39)] == names[:39]


def test_a_second_search_embeds_nothing_and_later_ones_what_is_new_or_changed(built, photos):
    (photos / os.fsdecode(b"caf\xe9.png")).write_bytes(image_bytes(20))
    first, _ = searched(built, photos)
    second, calls = searched(built, photos)
    assert calls == 0 and first.by_text("red", 99) == second.by_text("red", 99)
    names = sorted(path.name for path in photos.glob("*.png"))
    (photos / names[0]).unlink()
    (photos / names[1]).write_bytes(image_bytes(40))
    os.utime(photos / names[2], ns=(1, 1))
    (photos / "new.png").write_bytes(image_bytes(41))
    size = stored_file().stat().st_size
    third, calls = searched(built, photos)
    assert calls == 3 and len(third.ids) == 13 and abs(stored_file().stat().st_size - size) < 100  # the gone are gone
    np.testing.assert_allclose(third.features, expected(built, third.folder), atol=1e-5)


def test_other_weights_and_another_folder_have_indexes_of_their_own(built, photos, tmp_path):
    searched(built, photos)
    (tmp_path / "other").mkdir()
    for path in photos.glob("*.png"):
        os.link(path, tmp_path / "other" / path.name)
    assert searched(built, tmp_path / "other")[1] == 11
    weight = next(built.towers.model.visual.parameters())
    before = weight.detach().clone()
    with torch.no_grad():
        weight += 1e-3
        other = searched(built, photos)[1]
        weight.copy_(before)
    assert other == 12 and searched(built, photos)[1] == 0


def test_an_interrupted_index_goes_on_where_it_was(built, photos, monkeypatch):
    def interrupt(number, image) -> None:
        if number == 11:
            raise KeyboardInterrupt

    monkeypatch.setattr(index, "BATCH", 4)
    with pytest.raises(KeyboardInterrupt):
        searched(built, photos, interrupt)
    searcher, calls = searched(built, photos)
    assert 4 <= calls <= 8
    np.testing.assert_allclose(searcher.features, expected(built, searcher.folder), atol=1e-5)


def test_a_kill_costs_no_more_than_what_was_embedded_since_the_last_save(built, photos, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "BATCH", 4)
    monkeypatch.setattr(index, "SAVE_SECONDS", -1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)  # one after another
    # The third batch is prepared while the second is encoded: the first is stored.
    searched(built, photos, lambda number, _: number == 12 and shutil.copytree(cache, tmp_path / "at the kill"))
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "at the kill"))
    assert searched(built, photos)[1] <= 8


def rewrite(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Path], None]:
    """A file that is whole, with other content."""

    def damage(file: Path) -> None:
        with np.load(file) as stored:
            content = dict(stored)
        change(content)
        with file.open("wb") as stream:
            np.savez(stream, **content)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "nonsense": lambda file: file.write_bytes(b"nonsense"),
    "NaN": rewrite(lambda content: content["features"].__setitem__((3, 7), np.nan)),
    "a row of zeros": rewrite(lambda content: content["features"].__setitem__(3, 0)),
    "a row too few": rewrite(lambda content: content.update(features=content["features"][1:])),
    "another width": rewrite(lambda content: content.update(features=content["features"][:, 1:])),
    "no features": rewrite(lambda content: content.pop("features")),
    "no list": rewrite(lambda content: content.update(files=np.zeros(3, np.uint8))),
    "pickled": rewrite(lambda content: content.update(features=np.array([print], dtype=object))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_made_again(built, photos, damage):
    before, _ = searched(built, photos)
    DAMAGES[damage](stored_file())
    after, calls = searched(built, photos)
    assert calls == 12 and after.by_text("red", 99) == before.by_text("red", 99)
    assert searched(built, photos)[1] == 0


def test_a_flipped_bit_is_detected_or_harmless(built, tmp_path):
    (tmp_path / os.fsdecode(b"\xe9.png")).write_bytes(image_bytes(3))
    (tmp_path / "b.png").write_bytes(b"")
    before, _ = searched(built, tmp_path)
    content, draw = stored_file().read_bytes(), random.Random(1)
    for place in sorted(draw.sample(range(len(content)), 60)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << draw.randrange(8)
        stored_file().write_bytes(flipped)
        after, _ = searched(built, tmp_path)
        assert after.by_text("red", 9) == before.by_text("red", 9) and after.faults == before.faults, place


def test_bad_images_are_named_never_found_and_not_read_again(built, photos):
    (photos / "broken.jpg").write_bytes(b"\xff\xd8\xff no jpeg")
    (photos / "empty.png").write_bytes(b"")
    (photos / "phone.heic").write_bytes(b"of a kind that is not read")
    (photos / "gone.png").symlink_to(photos / "nowhere.png")
    Image.new("RGB", (9, 9)).save(photos / "odd.png")

    def refuse(number, image):
        if image.size == (9, 9):
            raise ZeroDivisionError

    for calls in (13, 0):
        searcher, transformed = searched(built, photos, refuse)
        assert transformed == calls and searcher.faults == {
            "broken.jpg": "image does not decode",
            "empty.png": "image is empty",
            "gone.png": "image file cannot be read",
            "phone.heic": "image format is not supported",
            "odd.png": "image cannot be transformed",
        }
        matches = searcher.by_text("a red circle", top=100)
        assert len(matches) == len(searcher.ids) == 12
        assert not {match.path for match in matches} & searcher.faults.keys()


def test_a_folder_of_bad_images_alone_has_no_matches(built, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    for _ in range(2):
        searcher, _ = searched(built, tmp_path)
        assert searcher.by_text("red", top=3) == [] and searcher.faults == {"a.png": "image does not decode"}


def test_a_lone_surrogate_in_a_query_is_an_unknown_character(built, photos):
    searcher, _ = searched(built, photos)
    strict = replace(built, tokenize=lambda texts: built.tokenize([text.encode().decode() for text in texts]))
    assert replace(searcher, built=strict).by_text("caf\udce9", top=3) == searcher.by_text("caf?", top=3)


def test_an_invalid_folder_or_query_is_an_error_of_one_line(built, photos, tmp_path):
    searcher, _ = searched(built, photos)
    with pytest.raises(UserError, match="the query is empty"):
        searcher.by_text("  ", top=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="and its subfolders contain no images"):
        Folder.open(tmp_path / "empty")
    (photos / "new.png").write_bytes(image_bytes(40))
    bad = replace(built, transform=lambda image: torch.full((3, 32, 32), torch.nan))
    with pytest.raises(RunFailed, match="features are not finite; the model's weights are broken"):
        Searcher.open("tiny", bad, Folder.open(photos))
