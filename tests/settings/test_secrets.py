"""The part of an address that gives access to the data is never shown."""

from __future__ import annotations

import pytest

from neuclip.settings.secrets import without_queries


@pytest.mark.parametrize(
    ("addresses", "shown"),
    [
        ("https://h/{a,b}.tar?sig=SECRET:2,photos", "https://h/{a,b}.tar,photos"),
        ("https://h/{{a,b},c}.tar?sig={SECRET,SECRET}", "https://h/{{a,b},c}.tar"),
        ("https://h/{a,b.tar?sig=SECRET", "https://h/{a,b.tar"),  # a brace that was forgotten
        ("https://h/x.tar?sig=SECRET&a='SECRET", "https://h/x.tar"),
        ("s3://h/my file.tar?sig=SEC RET,s3://h/b?x=1", "s3://h/my file.tar,s3://h/b"),
        ('["https://h/x.tar?sig=SECRET", "photos/?.tar"]', '["https://h/x.tar", "photos/?.tar"]'),
        ("https://h/x.tar,photos/?.tar", "https://h/x.tar,photos/?.tar"),
    ],
)
def test_queries_are_cut_and_names_of_local_files_stay(addresses, shown):
    assert without_queries(addresses) == shown
