from __future__ import annotations

import pytest

from neuclip.data.held_out import HeldOutSets
from neuclip.errors import UserError
from tests.data.small_shards import write_shards


def test_sets_whose_addresses_differ_only_in_the_query_are_refused_before_one_hides_the_other(server):
    write_shards(server.folder, [1, 1])
    one, two = f"{server.url}/00000.tar?id=1", f"{server.url}/00000.tar?id=2"
    with pytest.raises(UserError, match=r"/00000\.tar: several held-out sets differ only behind the question mark"):
        HeldOutSets.open((one, two), ())
    opened = HeldOutSets.open((one, one, f"{server.url}/00001.tar?id=1"), ())
    assert list(opened.retrieval) == [f"{server.url}/00000.tar", f"{server.url}/00001.tar"]
