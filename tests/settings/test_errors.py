"""The nearest right word, and the sentence that names it."""

from __future__ import annotations

import pytest

from neuclip.errors import RunFailed, RunInterrupted, UserError, any_of, nearest, proposal


@pytest.mark.parametrize(("word", "near"), [("trian", "train"), ("evla", "eval"), ("zzz", ""), ("", "")])
def test_the_nearest_word_is_one_with_most_letters_in_place_or_none(word, near):
    assert nearest(word, iter(["train", "eval", "traits"])) == near


@pytest.mark.parametrize(
    ("words", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c"], "a, b or c")]
)
def test_words_to_choose_from_are_listed_as_people_write_them(words, text):
    assert any_of(words) == text


def test_a_proposal_is_the_nearest_word_or_all_of_them():
    assert proposal("tran", ["train", "eval"]) == "did you mean train?"
    assert proposal("zzz", ["train", "eval"]) == "choose train or eval"


def test_a_mistake_of_the_user_is_a_value_error_and_a_failed_run_is_none():
    assert issubclass(UserError, ValueError) and not issubclass(RunFailed, ValueError)
    assert RunInterrupted("stopped", exit_code=130).exit_code == 130
