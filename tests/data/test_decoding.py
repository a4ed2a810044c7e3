"""Decoding: every mode that images come in, every way in which they are broken, and the fast, inexact path.

The fast path may stray a little from the exact pixels; it loses no image that the exact one reads.
"""

from __future__ import annotations

import io
import struct
import tracemalloc
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from neuclip.data.decoding import FastDecode, decode
from neuclip.data.source import BadSample
from neuclip.models.build import build_model
from neuclip.models.transforms import fast_crop
from tests.builders.data import encoded, image_bytes, png
from tests.builders.images import photo
from tests.builders.reading import travelled


@pytest.fixture(autouse=True)
def no_warnings():
    """One for each image would bury everything else."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def colour(image: Image.Image) -> tuple[int, ...]:
    """The first pixel, as the transforms see it."""
    pixel = image.convert("RGB").getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel


def reason(read, content: bytes) -> str:
    with pytest.raises(BadSample) as caught:
        read(content)
    return caught.value.reason


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "LAB", "YCbCr"])
def test_an_image_keeps_its_mode(mode):
    image = Image.open(io.BytesIO(image_bytes(0))).convert(mode)
    content = encoded(image, "TIFF" if mode in ("LAB", "YCbCr") else "PNG")
    assert decode(content).mode == mode
    assert np.array_equal(np.asarray(decode(content).convert("RGB")), np.asarray(image.convert("RGB")))


FRAMES = [Image.new("RGB", (8, 8), ink) for ink in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "ICO", "JPEG2000", "AVIF")
COLOURED = {  # content, colour, how far a lossy kind may stray
    "CMYK": (encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), (255, 0, 0), 3),
    "alpha leaves the colours below it": (encoded(Image.new("RGBA", (2, 2), (9, 99, 199, 128))), (9, 99, 199), 0),
    "16 bits": (png(1, 1, 16, 2, b"\0" + struct.pack(">3H", 0xFFFF, 0x8000, 0x0100)), (255, 128, 1), 0),
    "16 bits, alpha": (png(1, 1, 16, 6, b"\0" + struct.pack(">4H", 0xFFFF, 0x8000, 0x0100, 65535)), (255, 128, 1), 0),
    **{f"animated {form}": (encoded(FRAMES[0], form, save_all=True, append_images=FRAMES[1:]), (250, 0, 0), 6)
       for form in ("GIF", "PNG", "WEBP")},
    **{form: (encoded(Image.new("RGB", (16, 16), (0, 0, 0)), form), (0, 0, 0), 3) for form in FORMATS},
}  # fmt: skip


@pytest.mark.parametrize("name", COLOURED)
def test_an_image_of_whatever_kind_has_the_colours_of_its_first_frame(name):
    content, expected, most = COLOURED[name]
    assert "animated" not in name or getattr(Image.open(io.BytesIO(content)), "n_frames", 1) == 3
    assert colour(decode(content)) == pytest.approx(expected, abs=most)


@pytest.mark.parametrize("form", ["EPS", "TGA"])
def test_postscript_is_never_run_and_kinds_without_a_signature_are_not_read(form):
    assert reason(decode, encoded(Image.new("RGB", (16, 16)), form)) == "image does not decode"


def test_the_orientation_in_exif_data_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn by 90 degrees to show it. open_clip does not either
    image = Image.open(io.BytesIO(image_bytes(0, size=(40, 20))))
    assert decode(encoded(image, "JPEG", exif=exif)).size == (40, 20)


def test_an_image_with_damaged_exif_data_is_decoded():
    exif = Image.Exif()
    exif[0x010E] = "a description that is longer than four bytes"
    whole = encoded(Image.new("RGB", (8, 8), (10, 20, 30)), "JPEG", exif=exif)
    damaged = whole.replace(b"\x01\x0e\x00\x02\x00", b"\x01\x0e\x00\x02\x01")  # its length is now 16 MB
    with pytest.raises(UserWarning):
        Image.open(io.BytesIO(damaged))
    assert decode(damaged).size == (8, 8)


@pytest.mark.parametrize("transparency", [0, b"\x00\x80"])
def test_a_palette_with_transparency_has_its_colours(transparency):
    image = Image.new("P", (2, 1))
    image.putpalette([200, 10, 20, 30, 40, 250])
    image.putpixel((1, 0), 1)
    found = decode(encoded(image, transparency=transparency))
    assert [found.convert("RGB").getpixel((x, 0)) for x in (0, 1)] == [(200, 10, 20), (30, 40, 250)]
    assert colour(found.resize((4, 4))) == (200, 10, 20)  # transforms resize before they convert


# Sixteen bits


def test_sixteen_bit_grey_is_scaled_not_clipped():
    grey = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    big_endian = Image.frombytes("I;16B", (4, 1), grey.astype(">u2").tobytes())
    contents = [encoded(Image.fromarray(grey), form) for form in ("PNG", "TIFF")]
    contents += [encoded(big_endian, "TIFF"), b"P5 4 1 65535\n" + grey.astype(">u2").tobytes()]
    for content in contents:
        assert np.asarray(decode(content)).tolist() == [[0, 1, 128, 255]]


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


def test_float_pixels_are_refused_since_nothing_says_which_of_them_is_white():
    content = encoded(Image.fromarray(np.full((2, 2), 0.5, dtype=np.float32)), "TIFF")
    assert reason(decode, content) == "image does not decode"


# Broken images


@pytest.mark.parametrize("extension", ["png", "jpg", "webp"])
def test_every_cut_of_an_image_is_a_bad_sample_or_an_image(extension):
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False  # Pillow must not fill them up
    whole = image_bytes(1, extension, size=(40, 40))
    for cut in range(0, len(whole) - 20, max(1, len(whole) // 60)):
        try:
            decode(whole[:cut])
        except BadSample as bad:
            assert bad.reason in {"image is empty", "image is cut off", "image does not decode"}
        else:
            assert cut > len(whole) // 2  # only a missing end mark may pass


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "image is empty"),
        (b"GIF is not this", "image does not decode"),
        (image_bytes(0, "jpg", (64, 64))[:-200], "image is cut off"),
        (png(9_460, 9_460, 1, 0, bytes(1000)), "image is too large"),  # Pillow warns of this
        (png(30_000, 30_000, 1, 0, bytes(1000)), "image is too large"),  # and refuses this
    ],
)
def test_reasons_are_the_same_phrase_for_the_same_fault(content, expected):
    with pytest.raises(BadSample) as caught:
        decode(content, "here")
    assert (caught.value.reason, caught.value.where) == (expected, "here")


def test_the_limit_on_pixels_is_ours_even_where_another_library_lifted_pillows(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert reason(decode, png(10_000, 10_000, 1, 0, bytes(1000))) == "image is too large"
    monkeypatch.setattr("neuclip.data.decoding.MOST_PIXELS", 64)
    assert decode(image_bytes(0, size=(8, 8))).size == (8, 8)
    assert reason(decode, image_bytes(0, size=(13, 5))) == "image is too large"


# The fast path


@pytest.fixture(params=["simplejpeg", "Pillow alone"])
def fast(request, monkeypatch) -> FastDecode:
    if request.param == "Pillow alone":
        monkeypatch.setattr("neuclip.data.decoding.simplejpeg", None)
    else:
        pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    return FastDecode(64, smallest_crop=1.0)


@cache
def train_transform(scale: tuple[float, float]):
    return build_model("tiny", crop_scale=scale).train_transform


def exact(content: bytes) -> np.ndarray:
    return np.asarray(decode(content).convert("RGB"))


def outcome(read, content: bytes) -> str | bytes:
    try:
        return read(content).tobytes()
    except BadSample as bad:
        return bad.reason


def test_images_that_are_not_reduced_and_all_that_are_no_photos_have_the_exact_pixels(fast):
    kinds = [("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("RGBA", "PNG"), ("RGB", "WEBP")]
    contents = [photo(number, size) for number, size in enumerate([(60, 44), (255, 300), (91, 256), (1, 7)])]
    contents += [encoded(Image.open(io.BytesIO(photo(3))).convert(mode), form) for mode, form in kinds]
    for content in contents:
        assert np.array_equal(fast(content), exact(content))


def test_what_the_exact_path_refuses_is_refused_for_the_same_reason_and_nothing_else_is(fast):
    for content in (photo(2)[: len(photo(2)) // 2], b"", b"\xff\xd8" + b"\0" * 99):
        assert reason(fast, content) == reason(decode, content)
    draw = np.random.default_rng(0)
    for number in range(40):
        content = bytearray(photo(number % 5))
        content[int(draw.integers(2, len(content)))] ^= 1 << int(draw.integers(8))
        assert outcome(fast, bytes(content)) == outcome(exact, bytes(content))


@pytest.mark.parametrize(
    ("size", "shape"),
    [((700, 256), (128, 350)), ((700, 255), (255, 700)), ((1050, 515), (129, 263)), ((600, 1024), (256, 150))],
)
def test_a_jpeg_four_times_too_large_is_halved_and_no_smaller_than_twice_the_model(fast, size, shape):
    assert fast(photo(1, size)).shape == (*shape, 3)


@pytest.mark.parametrize(("scale", "side"), [(0.02, 1000), (0.08, 500), (0.9, 250)])
def test_the_smallest_crop_of_a_reduced_image_is_still_twice_as_large_as_the_model(scale, side):
    decoded = FastDecode(64, smallest_crop=scale)(photo(1, (1000, 1000)))
    assert decoded.shape == (side, side, 3)
    crop = train_transform((scale, scale)).stages[0]
    _, _, height, width = crop.get_params(torch.from_numpy(decoded).permute(2, 0, 1), list(crop.scale), [1.0, 1.0])
    assert height == width >= 2 * 64


def differences(read: FastDecode, content: bytes, scale: tuple[float, float], seed: int) -> torch.Tensor:
    """Of the same crop on both paths."""
    transform = train_transform(scale)
    torch.manual_seed(seed)
    want = transform(decode(content))
    torch.manual_seed(seed)
    got = travelled(fast_crop(transform))(read(content))
    assert got.shape == want.shape and got.dtype == torch.uint8
    return (got.int() - want.int()).abs().flatten()


def test_the_fast_crop_is_the_same_crop_and_fewer_than_one_value_in_20_differs_by_three_levels_at_most(fast):
    upright = [(70, 90), (66, 100), (75, 150)]  # which Pillow may filter columns first
    smaller = [(40, 33), (20, 60), (63, 50)]  # which are enlarged
    sizes = [(255, 200), (200, 255), (90, 130), (150, 75), (64, 64), *upright, *smaller]
    found = [differences(fast, photo(number, size), (0.4, 1.0), number) for number, size in enumerate(sizes)]
    difference = torch.cat(found)
    assert difference.max() <= 3
    assert (difference > 1).float().mean() < 1e-3
    assert (difference > 0).float().mean() < 1 / 20
    assert max((one > 0).float().mean() for one in found) < 1 / 4


def test_a_reduced_image_looks_the_same():
    assert differences(FastDecode(64, 1.0), photo(4, (800, 800)), (1.0, 1.0), 0).float().mean() < 2
