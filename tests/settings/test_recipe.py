from __future__ import annotations

import pytest
import yaml

from neuclip.errors import UserError
from neuclip.records import RunFolder
from neuclip.report.contents import read_contents
from neuclip.settings.reading import PlainLoader, read_settings

BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{depth}: &a{depth} [{', '.join([f'*a{depth - 1}'] * 10)}]\n" for depth in range(1, 10)
)


def test_aliases_that_mean_a_billion_values_are_refused(tmp_path):
    with pytest.raises(yaml.YAMLError, match="aliases"):
        yaml.load(BOMB, Loader=PlainLoader)
    folder = RunFolder(tmp_path)
    folder.settings.write_text(BOMB)
    assert read_contents(folder).unreadable == ["settings.yaml"]  # the report says so and goes on


def test_a_recipe_that_is_nested_too_deeply_is_a_user_error(tmp_path):
    (tmp_path / "deep.yaml").write_text("train: " + "[" * 5000)
    with pytest.raises(UserError, match="nested too deeply"):
        read_settings(tmp_path / "deep.yaml")
