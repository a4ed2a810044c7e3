"""Decoding: every mode that images come in, and every way in which they are broken."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from neuclip.data.decoding import MOST_PIXELS, decode
from neuclip.data.sample import BadSample
from tests.data.small_shards import image_bytes


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def png(width: int, height: int, bits: int, kind: int, rows: bytes) -> bytes:
    """A PNG by hand: Pillow reads 16 bits per channel and sizes that no memory holds, but writes neither."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)), (b"IDAT", zlib.compress(rows))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in [*chunks, (b"IEND", b"")]
    )


def colour(image: Image.Image) -> tuple[int, ...]:
    """The first pixel, as the transforms see it."""
    pixel = image.convert("RGB").getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "LAB", "YCbCr"])
def test_a_image_is_handed_on_in_its_own_mode(mode):
    image = Image.open(io.BytesIO(image_bytes(0))).convert(mode)
    content = encoded(image, "TIFF" if mode in ("LAB", "YCbCr") else "PNG")
    assert decode(content).mode == mode
    assert np.array_equal(np.asarray(decode(content).convert("RGB")), np.asarray(image.convert("RGB")))


def test_a_image_that_says_it_is_turned_stays_as_its_pixels_lie():
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn by 90 degrees to show it. open_clip does not either
    image = Image.open(io.BytesIO(image_bytes(0, size=(40, 20))))
    assert decode(encoded(image, "JPEG", exif=exif)).size == (40, 20)


def test_a_cmyk_jpeg_is_handed_on_as_it_is_and_has_its_colours():
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
def test_of_an_animation_the_first_frame_is_shown(form):
    frames = [Image.new("RGB", (8, 8), ink) for ink in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    stream = io.BytesIO()
    frames[0].save(stream, form, save_all=True, append_images=frames[1:], duration=50)
    assert getattr(Image.open(io.BytesIO(stream.getvalue())), "n_frames", 1) == 3
    assert colour(decode(stream.getvalue())) == pytest.approx((250, 0, 0), abs=6)


def test_what_a_image_is_its_bytes_say_but_postscript_is_never_run():
    for form in ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "ICO", "JPEG2000", "AVIF"):
        assert colour(decode(encoded(Image.new("RGB", (16, 16), (0, 0, 0)), form))) == pytest.approx((0, 0, 0), abs=3)
    for form in ("EPS", "TGA"):
        with pytest.raises(BadSample):
            decode(encoded(Image.new("RGB", (16, 16)), form))


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
def test_every_cut_of_a_image_is_a_bad_sample_or_a_image(extension):
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


@pytest.mark.parametrize("side", [9_460, 30_000])
def test_a_decompression_bomb_is_a_bad_sample_and_no_warning(side):
    assert side * side > MOST_PIXELS  # Pillow warns of the first and refuses the second
    bomb = png(side, side, 1, 0, bytes(1000))
    with warnings.catch_warnings(record=True) as warned, pytest.raises(BadSample) as caught:
        warnings.simplefilter("always")
        decode(bomb, "here")
    assert (caught.value.reason, caught.value.where) == ("image is too large", "here") and not warned


def test_the_limit_on_pixels_is_ours_even_where_another_library_lifted_pillows(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(BadSample, match="image is too large"):
        decode(png(10_000, 10_000, 1, 0, bytes(1000)))


def test_a_image_with_damaged_exif_data_is_decoded_and_warns_of_nothing():
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


def test_pillow_is_not_told_to_invent_what_a_cut_image_lacks():
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
