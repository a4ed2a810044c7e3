from __future__ import annotations

import re

import pytest

from neuclip.datasets.catalogue import DataSet, catalogue
from neuclip.datasets.fetching import TOOLS

SETS = list(catalogue().values())


@pytest.mark.parametrize("data_set", SETS, ids=lambda data_set: data_set.name)
def test_what_the_list_says_of_a_set_fits_what_is_known(data_set: DataSet):
    assert catalogue()[data_set.name] is data_set
    assert re.fullmatch(r"[a-z][a-z0-9-]+", data_set.name)  # no slash, colon or comma: it stands in addresses
    assert data_set.parts and len(set(data_set.parts)) == len(data_set.parts)
    assert re.search(r"\d", data_set.about) and data_set.licence
    for package in data_set.packages:
        assert f"{TOOLS[package.registry]}, {package.megabytes} MB" in data_set.needs
        assert package.version or package.registry == "debian"


@pytest.mark.parametrize("data_set", SETS, ids=lambda data_set: data_set.name)
def test_the_version_of_a_set_is_the_same_at_every_call_and_names_its_packages(data_set: DataSet):
    assert data_set.version() == data_set.version()
    for package in data_set.packages:
        assert package.version in data_set.version()


def test_only_icons_30k_is_made_without_fetching():
    assert [data_set.name for data_set in SETS if not data_set.packages] == ["icons-30k"]
