from __future__ import annotations

from neuclip.datasets.emoji import hex_key, read_emoji_table


def test_the_emoji_table_holds_every_base_emoji_once_and_no_skin_tone():
    table = read_emoji_table()
    assert len(table) == len({row.hex for row in table}) == 1906
    assert len({row.group for row in table}) == 9
    assert not any(0x1F3FB <= ord(character) <= 0x1F3FF for row in table for character in row.characters)
    assert all(row.name and row.group and row.subgroup for row in table)


def test_hex_keys_do_not_depend_on_the_vendors_spelling():
    assert hex_key("2764-fe0f-200d-1f525") == hex_key("2764-200D-1F525") == "2764-200D-1F525"
