from __future__ import annotations

import json

import numpy as np
import pytest

from neuclip.datasets.drawing import draw
from neuclip.datasets.iconify.collections import FAMILIES, family_of, read_collections, read_icons
from neuclip.errors import RunFailed


def test_logos_brands_and_forbidding_licences_are_left_out(package):
    assert [collection.name for collection in read_collections(package)] == ["alpha", "beta", "gamma", "delta"]


def test_hidden_icons_and_brand_marks_are_left_out(package):
    icons = read_icons(read_collections(package)[0])
    names = [icon.name for icon in icons.icons]
    assert names == sorted(names) and "house" in names
    assert not {"secret", "brand-acme"} & set(names) and icons.brands == 1


def test_icons_that_the_collection_files_under_brands_are_left_out(package):
    file = package / "json" / "beta.json"
    content = json.loads(file.read_text()) | {"categories": {"Brand / Logo": ["sun", "key"], "Nature": ["leaf"]}}
    file.write_text(json.dumps(content))
    icons = read_icons(read_collections(package)[1])
    assert {icon.name for icon in icons.icons} == {"bell", "cat", "drop", "house", "leaf", "moon"} and icons.brands == 2


def test_an_alias_is_a_name_of_the_same_drawing_and_a_mirrored_one_is_not(package):
    aliases = {icon.name: icon.aliases for icon in read_icons(read_collections(package)[0]).icons}
    assert aliases["house"] == ("home",) and aliases["key"] == ()


def test_aliases_that_name_each_other_end(package):
    file = package / "json" / "beta.json"
    cycles = {"a": {"parent": "b"}, "b": {"parent": "a"}, "lune": {"parent": "luna"}, "luna": {"parent": "moon"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"aliases": cycles}))
    aliases = {icon.name: icon.aliases for icon in read_icons(read_collections(package)[1]).icons}
    assert aliases["moon"] == ("luna", "lune") and aliases["sun"] == ()


def test_an_icon_is_framed_by_its_own_size_then_by_that_of_its_collection(package):
    file = package / "json" / "beta.json"
    square = '<path d="M0 0h24v24H0z"/>'
    content = json.loads(file.read_text())
    content["icons"] = {"full": {"body": square}, "quarter": {"body": square, "left": -24, "width": 48, "height": 48}}
    file.write_text(json.dumps(content))
    full, quarter = (draw(icon.svg) for icon in read_icons(read_collections(package)[1]).icons)
    assert (full < 128).mean() == pytest.approx((60 / 64) ** 2, abs=0.02)
    rows, columns = np.nonzero((quarter < 128).any(axis=2))
    assert rows.max() <= 33 and columns.min() >= 31, "the upper right quarter"


def test_a_damaged_file_is_named_with_a_remedy(package):
    (package / "json" / "beta.json").write_text('{"icons": ')
    with pytest.raises(RunFailed, match=r"beta\.json: cannot be read .* prepare iconify again"):
        read_icons(read_collections(package)[1])


def test_versions_styles_and_forks_of_one_origin_are_one_family():
    assert len({family_of(prefix) for prefix in ("mdi", "ic", "material-symbols-light")}) == 1
    assert family_of("streamline-plump-color") == family_of("streamline") != family_of("tabler")
    everything = [prefix for prefixes in FAMILIES.values() for prefix in prefixes]
    assert len(everything) == len(set(everything)), "a collection is in one family only"
