"""Text is converted to its declared type without a change of meaning, or refused."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, strategies

from neuclip.errors import UserError
from neuclip.settings.values import RawValue, parse


@pytest.mark.parametrize(
    ("text", "number"),
    [("128", 128), ("1e6", 10**6), ("2_000", 2000), ("10k", 10**4), ("3M", 3 * 10**6), ("1.5M", 1_500_000), ("-1", -1)],
)
def test_whole_numbers_are_read_as_people_write_them(text, number):
    assert parse(text, int) == number


@pytest.mark.parametrize(
    "value", ["1.5", "1e-3", "012", "0x10", "abc", "", "1m", "1 000", "1e999999999", True, None, []]
)
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(ValueError, match="whole number"):
        parse(value, int)


@pytest.mark.parametrize("value", ["nan", "inf", ".inf", "1e999", "1:30", "012", "10k", "abc", True, None])
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match="number"):
        parse(value, float)


@given(strategies.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_survives_its_own_spelling(number):
    assert parse(repr(number), float) == number


def test_a_word_that_yaml_takes_for_a_boolean_is_no_text():
    with pytest.raises(ValueError, match="quotes"):
        parse(True, str)


@pytest.mark.parametrize(("value", "wanted"), [(True, True), ("false", False), ("True", True)])
def test_booleans_are_true_or_false(value, wanted):
    assert parse(value, bool) is wanted


@pytest.mark.parametrize("value", ["1", "yes", "", None])
def test_nothing_else_is_a_boolean(value):
    with pytest.raises(ValueError, match="true or false"):
        parse(value, bool)


def test_a_bare_flag_is_true_and_an_empty_yaml_field_is_an_error():
    assert RawValue("log.wandb", None).convert(bool) is True
    with pytest.raises(UserError, match=r"^a.yaml line 3: log.wandb is empty"):
        RawValue("log.wandb", None, "a.yaml line 3").convert(bool)


@pytest.mark.parametrize("text", ["", "none"])
def test_none_and_nothing_are_the_empty_list(text):
    assert parse(text, tuple[str, ...]) == ()


def test_commas_inside_braces_do_not_separate():
    assert parse("shards/{0,1}.tar, other", tuple[str, ...]) == ("shards/{0,1}.tar", "other")


def test_a_list_in_yaml_may_hold_what_a_flag_cannot_say():
    assert parse(["none", ""], tuple[str, ...]) == ("none", "")


@pytest.mark.parametrize("value", ["0.8", "0.8,0.9,1", "0.8,", ["0.8"], "a,b", None])
def test_a_pair_needs_two_numbers(value):
    with pytest.raises(ValueError):
        parse(value, tuple[float, float])


def test_a_wrong_choice_names_all_and_the_nearest():
    with pytest.raises(ValueError, match=r"choose constant or cosine \(did you mean cosine\?\)"):
        parse("cosin", Literal["constant", "cosine"])
