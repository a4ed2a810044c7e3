"""Decoding: every mode that images come in, every way in which they are broken, and the fast, inexact path.

The fast path may stray a little from the exact pixels; it loses no image that the exact one reads.
"""

from __future__ import annotations

import io
import struct
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from neuclip.models.build import build_model
from neuclip.models.transforms import fast_crop
from tests.builders.data import (
    BadSample,
    FastDecode,
    decode,
    encoded,
    image_bytes,
    png,
    travelled,
)
from tests.builders.images import photo


def colour(image: Image.Image) -> tuple[int, ...]:
    """The first pixel, as the transforms see it."""
    pixel = image.convert("RGB").getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "LAB", "YCbCr"])
def test_an_image_keeps_its_mode(mode):
    image = Image.open(io.BytesIO(image_bytes(0))).convert(mode)
    content = encoded(image, "TIFF" if mode in ("LAB", "YCbCr") else "PNG")
    assert decode(content).mode == mode
    assert np.array_equal(np.asarray(decode(content).convert("RGB")), np.asarray(image.convert("RGB")))


def test_the_orientation_in_exif_data_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn by 90 degrees to show it. open_clip does not either
    image = Image.open(io.BytesIO(image_bytes(0, size=(40, 20))))
    assert decode(encoded(image, "JPEG", exif=exif)).size == (40, 20)


def test_a_cmyk_jpeg_keeps_its_mode_and_colours():
    red = decode(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert red.mode == "CMYK" and colour(red) == pytest.approx((255, 0, 0), abs=3)


def test_a_palette_with_transparency_has_its_colours_and_warns_of_nothing():
    image = Image.new("P", (2, 1))
    image.putpalette([200, 10, 20, 30, 40, 250])
    image.putpixel((1, 0), 1)
    for transparency in (0, b"\x00\x80"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = decode(encoded(image, transparency=transparency))
            assert [found.convert("RGB").getpixel((x, 0)) for x in (0, 1)] == [(200, 10, 20), (30, 40, 250)]
            assert colour(found.resize((4, 4))) == (200, 10, 20)  # transforms resize before they convert


def test_alpha_is_left_out_and_the_colours_below_it_stay():
    assert colour(decode(encoded(Image.new("RGBA", (2, 2), (9, 99, 199, 128))))) == (9, 99, 199)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_decoded_to_its_first_frame(form):
    frames = [Image.new("RGB", (8, 8), ink) for ink in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    stream = io.BytesIO()
    frames[0].save(stream, form, save_all=True, append_images=frames[1:], duration=50)
    assert getattr(Image.open(io.BytesIO(stream.getvalue())), "n_frames", 1) == 3
    assert colour(decode(stream.getvalue())) == pytest.approx((250, 0, 0), abs=6)


def test_the_bytes_decide_the_format_and_postscript_is_never_run():
    for form in ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "ICO", "JPEG2000", "AVIF"):
        assert colour(decode(encoded(Image.new("RGB", (16, 16), (0, 0, 0)), form))) == pytest.approx((0, 0, 0), abs=3)
    for form in ("EPS", "TGA"):
        with pytest.raises(BadSample):
            decode(encoded(Image.new("RGB", (16, 16)), form))


def test_strips_of_an_image_of_sixteen_bits_fit_together_and_take_little_memory(monkeypatch):
    monkeypatch.setattr("neuclip.data.decoding.STRIP_PIXELS", 30)
    grey = np.random.default_rng(0).integers(0, 65536, (17, 7), dtype=np.uint16)
    decoded = np.asarray(decode(encoded(Image.fromarray(grey))))
    assert np.array_equal(decoded, (grey.astype(np.int64) * 255 + 32767) // 65535)
    monkeypatch.setattr("neuclip.data.decoding.STRIP_PIXELS", 3000)
    large = encoded(Image.fromarray(np.full((900, 990), 65535, np.uint16)), compress_level=1)
    tracemalloc.start()
    decode(large)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2 * 900 * 990  # of arrays: a byte for each pixel and one strip, not eight bytes for each


def test_sixteen_bit_grey_is_scaled_not_clipped():
    grey = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    for form in ("PNG", "TIFF"):
        assert np.asarray(decode(encoded(Image.fromarray(grey), form))).tolist() == [[0, 1, 128, 255]]
    big_endian = Image.frombytes("I;16B", (4, 1), grey.astype(">u2").tobytes())
    assert np.asarray(decode(encoded(big_endian, "TIFF"))).tolist() == [[0, 1, 128, 255]]
    assert np.asarray(decode(b"P5 4 1 65535\n" + grey.astype(">u2").tobytes())).tolist() == [[0, 1, 128, 255]]


@pytest.mark.parametrize(("kind", "channels"), [(2, (0xFFFF, 0x8000, 0x0100)), (6, (0xFFFF, 0x8000, 0x0100, 0xFFFF))])
def test_sixteen_bit_colours_are_scaled(kind, channels):
    pixel = struct.pack(f">{len(channels)}H", *channels)
    assert colour(decode(png(1, 1, 16, kind, b"\0" + pixel))) == (255, 128, 1)


def test_float_pixels_are_refused_since_nothing_says_which_of_them_is_white():
    with pytest.raises(BadSample, match="image does not decode"):
        decode(encoded(Image.fromarray(np.full((2, 2), 0.5, dtype=np.float32)), "TIFF"))


@pytest.mark.parametrize("extension", ["png", "jpg", "webp"])
def test_every_cut_of_an_image_is_a_bad_sample_or_an_image(extension):
    whole = image_bytes(1, extension, size=(40, 40))
    for cut in range(0, len(whole) - 20, max(1, len(whole) // 60)):
        try:
            decode(whole[:cut])
        except BadSample as bad:
            assert bad.reason in {"image is empty", "image is cut off", "image does not decode"}
        else:
            assert cut > len(whole) // 2  # only a missing end mark may pass


def test_reasons_are_the_same_phrase_for_the_same_fault():
    found = {}
    for content in (b"", b"GIF is not this", image_bytes(0, "jpg", (64, 64))[:-200]):
        with pytest.raises(BadSample) as caught:
            decode(content, "here")
        found[caught.value.reason] = caught.value.where
    assert found == {"image is empty": "here", "image does not decode": "here", "image is cut off": "here"}


@pytest.mark.parametrize("side", [9_460, 30_000])  # Pillow warns of the first and refuses the second
def test_a_decompression_bomb_is_a_bad_sample_and_no_warning(side):
    bomb = png(side, side, 1, 0, bytes(1000))
    with warnings.catch_warnings(record=True) as warned, pytest.raises(BadSample) as caught:
        warnings.simplefilter("always")
        decode(bomb, "here")
    assert (caught.value.reason, caught.value.where) == ("image is too large", "here") and not warned


def test_the_limit_on_pixels_is_ours_even_where_another_library_lifted_pillows(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(BadSample, match="image is too large"):
        decode(png(10_000, 10_000, 1, 0, bytes(1000)))
    monkeypatch.setattr("neuclip.data.decoding.MOST_PIXELS", 64)
    assert decode(image_bytes(0, size=(8, 8))).size == (8, 8)
    with pytest.raises(BadSample, match="image is too large"):
        decode(image_bytes(0, size=(13, 5)))


def test_an_image_with_damaged_exif_data_is_decoded_and_warns_of_nothing():
    exif = Image.Exif()
    exif[0x010E] = "a description that is longer than four bytes"
    whole = encoded(Image.new("RGB", (8, 8), (10, 20, 30)), "JPEG", exif=exif)
    damaged = whole.replace(b"\x01\x0e\x00\x02\x00", b"\x01\x0e\x00\x02\x01")  # its length is now 16 MB
    with pytest.warns(UserWarning):
        Image.open(io.BytesIO(damaged))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert decode(damaged).size == (8, 8)
    assert not warned


def test_pillow_does_not_fill_up_truncated_images():
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


@pytest.fixture(params=["simplejpeg", "Pillow alone"])
def fast(request, monkeypatch) -> FastDecode:
    if request.param == "Pillow alone":
        monkeypatch.setattr("neuclip.data.decoding.simplejpeg", None)
    else:
        pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    return FastDecode(64, smallest_crop=1.0)


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


def test_a_jpeg_four_times_too_large_is_halved_and_no_smaller_than_twice_the_model(fast):
    assert fast(photo(1, (700, 256))).shape == (128, 350, 3)
    assert fast(photo(1, (700, 255))).shape == (255, 700, 3)
    assert fast(photo(1, (1050, 515))).shape == (129, 263, 3)
    assert fast(photo(1, (600, 1024))).shape == (256, 150, 3)


@pytest.mark.parametrize(("scale", "side"), [(0.02, 1000), (0.08, 500), (0.9, 250)])
def test_the_smallest_crop_of_a_reduced_image_is_still_twice_as_large_as_the_model(scale, side):
    decoded = FastDecode(64, smallest_crop=scale)(photo(1, (1000, 1000)))
    assert decoded.shape == (side, side, 3)
    crop = build_model("tiny", crop_scale=(scale, scale)).train_transform.stages[0]
    _, _, height, width = crop.get_params(torch.from_numpy(decoded).permute(2, 0, 1), list(crop.scale), [1.0, 1.0])
    assert height == width >= 2 * 64


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
    for number in range(40):
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
    crop = travelled(fast_crop(built.train_transform))
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
