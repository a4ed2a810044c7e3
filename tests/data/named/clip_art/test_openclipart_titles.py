from __future__ import annotations

from collections import Counter

import pytest

from neuclip.data.named.clip_art.titles import Metadata, caption_of, name_of, useful_tags


@pytest.mark.parametrize(
    ("stem", "title", "author", "name"),
    [
        ("pencil_benji_park_01", "pencil", "Benji Park", "pencil"),
        ("utensile_sega_architetto_01", "Utensile sega", "Architetto Francesco Rollandin", "utensile sega"),
        ("orleans_express_lower_l_", "orleans_express_lower_left_corner", "J. B.", "orleans express lower left corner"),
        ("ch_teau-fort_01", "Ch\u00e2teau-fort", "", "ch\u00e2teau fort"),
        ("car", "Clipart by Nicu Buculei - piggybank", "Nicu Buculei", "car"),
        ("australia-black", "Australian Maps", "Chris Goerner", "australia black"),
        ("raccoon_ganson", "Raccoon Opening Box", "Gerald G.", "raccoon opening box"),
        ("stripper_jarno_vasamaa_01r", "stripper", "Jarno Vasamaa", "stripper"),
        ("aiga_stairs_", "AIGA_Symbol_Signs", "Jean-Victor Balin", "stairs"),
        ("home12", "Various Cliparts", "", "home"),
        ("lock", "", "", "lock"),
        ("bullet_hole_linda_kim_ab", "Bullet Hole", "Linda Kim", "bullet hole"),
        ("moon_mo_01", "Various Cliparts", "mo", "moon mo"),
        ("card_back", "card", "Nicu Buculei", "card back"),
        ("ralf_ark.in-berlin.de_ra_01", "ralf@ark.in-berlin.de", "ralf@ark.in-berlin.de", ""),
        ("fc07", "Clipart by Nicu Buculei - fc23", "Nicu Buculei", ""),
        ("bordered_h_4", "card", "Nicu Buculei", "4 of hearts"),
        ("white_s_q", "card", "Nicu Buculei", "queen of spades"),
    ],
)
def test_a_drawing_is_named_by_its_own_title_or_by_its_file_without_the_author(stem, title, author, name):
    assert name_of(stem, Metadata(title, author, (), "")) == name


def test_tags_of_programs_and_authors_and_repeated_tags_are_no_tags():
    tags = (
        "",
        "hash",
        "hash(0x8c82364)",
        "0x9371fbc",
        "http://a.b",
        "unsorted",
        "11",
        "Benji_Park",
        "north_america",
        "flag",
        "Flag",
    )
    assert useful_tags(Metadata("", "Benji Park", tags, "")) == ["north america", "flag"]


def test_a_caption_adds_the_three_commonest_tags_that_say_something_new():
    frequency = Counter(animal=9, mammal=8, monkey=7, chimp=2, angry=2, primate=1)
    tags = ["primate", "mammal", "monkey", "chimp", "animal", "angry"]
    assert caption_of("crazy monkeys", tags, frequency) == "crazy monkeys, animal, mammal, angry"
    assert caption_of("", ["chimp", "animal"], frequency) == "animal, chimp"
    assert caption_of("", [], frequency) == ""
