"""Decoding: every mode that pictures come in, and every way in which they are broken."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
from PIL import Image

from neuclip.data.sample import BadSample
from neuclip.data.transforms import decode
from tests.data.test_sources import picture


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image.save(stream, form)
    return stream.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1"])
def test_a_picture_is_handed_on_in_its_own_mode(mode):
    image = Image.open(io.BytesIO(picture(0))).convert(mode)
    assert decode(encoded(image)).mode == mode
    assert np.array_equal(np.asarray(decode(encoded(image)).convert("RGB")), np.asarray(image.convert("RGB")))


def test_a_cmyk_jpeg_is_handed_on_as_it_is():
    assert decode(encoded(Image.new("CMYK", (8, 8), (10, 20, 30, 40)), "JPEG")).mode == "CMYK"


def test_sixteen_bit_grey_is_scaled_not_clipped():
    grey = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    assert np.asarray(decode(encoded(Image.fromarray(grey)))).tolist() == [[0, 1, 128, 255]]


@pytest.mark.parametrize("extension", ["png", "jpg", "webp"])
def test_every_cut_of_a_picture_is_a_bad_sample_or_a_picture(extension):
    whole = picture(1, extension, size=(40, 40))
    for cut in range(0, len(whole) - 20, max(1, len(whole) // 60)):
        try:
            decode(whole[:cut])
        except BadSample as bad:
            assert bad.reason in {"picture is empty", "picture is cut off", "picture does not decode"}
        else:
            assert cut > len(whole) // 2  # only a missing end mark may pass


def test_reasons_are_the_same_phrase_for_the_same_fault():
    found = {}
    for content in (b"", b"GIF is not this", picture(0, "jpg", (64, 64))[:-200]):
        with pytest.raises(BadSample) as caught:
            decode(content, "here")
        found[caught.value.reason] = caught.value.where
    assert found == {"picture is empty": "here", "picture does not decode": "here", "picture is cut off": "here"}


@pytest.mark.parametrize("side", [13, 100])
def test_a_picture_too_large_to_be_meant_is_a_bad_sample_and_no_warning(side, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 150)  # 13 x 13 warns, 100 x 100 raises
    with warnings.catch_warnings(record=True) as warned, pytest.raises(BadSample) as caught:
        warnings.simplefilter("always")
        decode(encoded(Image.new("RGB", (side, side))))
    assert caught.value.reason == "picture is too large" and not warned
