"""The inexact path from bytes to pixels: how far it may stray, and that it loses no image that the exact one has."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from neuclip.data import decoding
from neuclip.data.decoding import FastDecode, decode
from neuclip.data.sample import BadSample
from neuclip.models.pixels import fast_crop
from neuclip.models.towers import build_model
from tests.images import photo

NEEDS_SIMPLEJPEG = pytest.mark.skipif(decoding.simplejpeg is None, reason="simplejpeg is not installed")


@pytest.fixture(params=["simplejpeg", "Pillow alone"])
def fast(request, monkeypatch) -> FastDecode:
    if request.param == "Pillow alone":
        monkeypatch.setattr(decoding, "simplejpeg", None)
    elif decoding.simplejpeg is None:
        pytest.skip("simplejpeg is not installed")
    return FastDecode(64, smallest_crop=1.0)


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def exact(content: bytes) -> np.ndarray:
    return np.asarray(decode(content).convert("RGB"))


def test_images_that_are_not_reduced_have_the_exact_pixels(fast):
    for number, size in enumerate([(60, 44), (255, 300), (91, 256), (1, 7)]):
        content = photo(number, size)
        assert np.array_equal(fast(content), exact(content))


@pytest.mark.parametrize(
    "mode, form", [("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("RGBA", "PNG"), ("RGB", "WEBP")]
)
def test_other_kinds_of_images_have_the_exact_pixels(fast, mode, form):
    content = encoded(Image.open(io.BytesIO(photo(3))).convert(mode), form)
    assert np.array_equal(fast(content), exact(content))


def test_a_image_four_times_too_large_comes_at_half_its_size_and_no_smaller_than_twice_the_model(fast):
    assert fast(photo(1, (700, 256))).shape == (128, 350, 3)
    assert fast(photo(1, (700, 255))).shape == (255, 700, 3)
    assert fast(photo(1, (2100, 1030))).shape == (129, 263, 3)


@pytest.mark.parametrize(("scale", "side"), [(0.02, 1000), (0.08, 500), (0.25, 500), (0.9, 250)])
def test_the_smallest_crop_of_a_reduced_image_is_still_twice_as_large_as_the_model(scale, side):
    decoded = FastDecode(64, smallest_crop=scale)(photo(1, (1000, 1000)))
    assert decoded.shape == (side, side, 3)
    crop = build_model("tiny", crop_scale=(scale, scale)).train_transform.stages[0]
    _, _, height, width = crop.get_params(torch.from_numpy(decoded).permute(2, 0, 1), list(crop.scale), [1.0, 1.0])
    assert height == width >= 2 * 64


@NEEDS_SIMPLEJPEG
def test_only_plain_jpegs_that_are_not_reduced_take_the_short_way():
    fast = FastDecode(64, smallest_crop=1.0)
    assert fast._is_plain_jpeg(photo(0))
    assert not fast._is_plain_jpeg(photo(0, (700, 256)))
    assert not fast._is_plain_jpeg(encoded(Image.new("L", (9, 9)), "JPEG"))
    assert not fast._is_plain_jpeg(b"\xff\xd8 and nothing more")


@pytest.mark.parametrize("spoil", [lambda c: c[: len(c) // 2], lambda c: b"", lambda c: b"\xff\xd8" + b"\0" * 99])
def test_what_the_exact_path_refuses_is_refused_for_the_same_reason(fast, spoil):
    content = spoil(photo(2))
    with pytest.raises(BadSample) as want:
        decode(content)
    with pytest.raises(BadSample) as got:
        fast(content)
    assert got.value.reason == want.value.reason


def test_flipped_bytes_are_bad_for_both_or_for_none(fast):
    damaged = np.random.default_rng(0)
    for number in range(60):
        content = bytearray(photo(number % 5))
        content[int(damaged.integers(2, len(content)))] ^= 1 << int(damaged.integers(8))
        assert outcome(fast, bytes(content)) == outcome(exact, bytes(content))


def outcome(read, content: bytes) -> str | bytes:
    try:
        return read(content).tobytes()
    except BadSample as bad:
        return bad.reason


def test_the_fast_crop_is_the_same_crop_and_fewer_than_one_value_in_20_differs_by_three_levels_at_most(fast):
    built = build_model("tiny", crop_scale=(0.4, 1.0))
    crop = pickle.loads(pickle.dumps(fast_crop(built.train_transform)))
    differences = []
    upright = [(70, 90), (66, 100), (75, 150)]  # which Pillow may filter columns first
    smaller = [(40, 33), (20, 60), (63, 50)]  # which are enlarged
    for number, size in enumerate([(255, 200), (200, 255), (90, 130), (150, 75), (64, 64), *upright, *smaller]):
        torch.manual_seed(number)
        want = built.train_transform(decode(photo(number, size)))
        torch.manual_seed(number)
        got = crop(fast(photo(number, size)))
        assert got.shape == want.shape and got.dtype == torch.uint8
        differences.append((got.int() - want.int()).abs().flatten())
    difference = torch.cat(differences)
    assert difference.max() <= 3
    assert (difference > 1).float().mean() < 1e-3
    assert (difference > 0).float().mean() < 1 / 20
    assert max((one > 0).float().mean() for one in differences) < 1 / 4


def test_a_reduced_image_looks_the_same():
    built = build_model("tiny", crop_scale=(1.0, 1.0))
    crop = fast_crop(built.train_transform)
    content = photo(4, (800, 800))
    torch.manual_seed(0)
    want = built.train_transform(decode(content)).int()
    torch.manual_seed(0)
    assert (crop(FastDecode(64, 1.0)(content)).int() - want).abs().float().mean() < 2
