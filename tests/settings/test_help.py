"""The help follows from the dataclasses: no field is forgotten."""

from __future__ import annotations

import pytest

from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.reading import declared_types
from neuclip.settings.writing import help_text


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_the_help_names_every_field_of_every_objective(objective):
    for key in declared_types(objective):
        assert f"--{key} " in help_text()


def test_the_help_tells_default_and_tiny_value():
    assert "[default: 1024; tiny: 128]" in help_text(["train"])


def test_help_of_one_section_holds_no_other():
    assert "--log.every" in help_text(["log"])
    assert "--train.samples" not in help_text(["log"])


def test_no_line_is_wider_than_a_wide_terminal():
    assert max(len(line) for line in help_text().splitlines()) <= 110
