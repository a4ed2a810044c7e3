"""The part of an address that gives access to the data is never shown."""

from __future__ import annotations

import pytest

from neuclip.secrets import holds_secret, without_queries, without_query, without_secrets

SHOWN = {
    # Queries are cut, and names of local files stay.
    "https://h/{a,b}.tar?sig=SECRET:2,photos": "https://h/{a,b}.tar,photos",
    "https://h/{{a,b},c}.tar?sig={SECRET,SECRET}": "https://h/{{a,b},c}.tar",
    "https://h/{a,b.tar?sig=SECRET": "https://h/{a,b.tar",  # a brace that was forgotten
    "https://h/x.tar?sig=SECRET&a='SECRET": "https://h/x.tar",
    "s3://h/my file.tar?sig=SEC RET,s3://h/b?x=1": "s3://h/my file.tar,s3://h/b",
    '["https://h/x.tar?sig=SECRET", "photos/?.tar"]': '["https://h/x.tar", "photos/?.tar"]',
    "https://h/x.tar,photos/?.tar": "https://h/x.tar,photos/?.tar",
    # User and password are hidden, and ports, weights and names stay.
    "https://me:SECRET@h:8080/x.tar:2,photos": "https://***@h:8080/x.tar:2,photos",
    "https://SECRET@h/x.tar": "https://***@h/x.tar",  # a token
    "https://me:SEC@RET@h/x.tar": "https://***@h/x.tar",
    "https://me:SEC,RET@h/x.tar,b.csv": "https://***@h/x.tar,b.csv",
    "https://me:SEC/RET@h/x.tar": "https://***@h/x.tar",
    "https://me:SEC?RET@h/x.tar?sig=SECRET": "https://***@h/x.tar",
    "https://me:S@h/a.tar,s3://k:S@h/b.tar?sig=SECRET": "https://***@h/a.tar,s3://***@h/b.tar",
    '["https://me:SECRET@h/x.tar"]': '["https://***@h/x.tar"]',
    "https://h:8080/a@b.tar,s3://b:0.5,s3://b,c@d.csv": "https://h:8080/a@b.tar,s3://b:0.5,s3://b,c@d.csv",
    "http://[2001:db8::1]:80/x.tar,http://me:SECRET@[::1]/x.tar": "http://[2001:db8::1]:80/x.tar,http://***@[::1]/x.tar",
    "https://{a,b}:80/x.tar,https://h:{80,81}/x.tar": "https://{a,b}:80/x.tar,https://h:{80,81}/x.tar",
}


@pytest.mark.parametrize("addresses", SHOWN)
def test_what_gives_access_is_not_shown_and_the_rest_of_an_address_is(addresses):
    assert without_queries(addresses) == SHOWN[addresses]


def test_a_message_around_an_address_stays():
    message = "s3://bucket: no shards; http://h:80: failed, url='http://me:SECRET@h:80/x', see https://me:SECRET@h"
    shown = "s3://bucket: no shards; http://h:80: failed, url='http://***@h:80/x', see https://***@h"
    assert without_query(message) == shown


def test_settings_hold_a_secret_if_an_address_has_a_query_or_a_user():
    assert holds_secret("data:\n  train: https://me:SECRET@h/x.tar\n") and holds_secret("train: 'https://h/x?sig=1'")
    assert not holds_secret("data:\n  train: https://h:80/x.tar\n  other: photos/?.tar, a@b\n")


def test_what_stands_behind_an_address_in_a_message_stays():
    message = "http:/me:SECRET@h/a.tar?sig=SEC:RET: no recipe; 'https://h/b?x=SECRET', (s3://b/c?SECRET) is x? no"
    shown = "http:/***@h/a.tar: no recipe; 'https://h/b', (s3://b/c) is x? no"
    assert without_secrets(message) == shown
    assert without_secrets("C:/a@b/c?.tar and photos/?.tar: gone?") == "C:/a@b/c?.tar and photos/?.tar: gone?"
