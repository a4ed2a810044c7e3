"""The words that help: the nearest right one, and the command that installs what is missing."""

from __future__ import annotations

import json
import sys

import pytest

from neuclip.errors import RunFailed, RunInterrupted, UserError, any_of, install_command, nearest, proposal, require


@pytest.mark.parametrize(("word", "near"), [("trian", "train"), ("evla", "eval"), ("zzz", ""), ("", "")])
def test_the_nearest_word_is_one_with_most_letters_in_place_or_none(word, near):
    assert nearest(word, iter(["train", "eval", "traits"])) == near


def test_a_proposal_is_the_nearest_word_or_all_of_them_as_people_write_lists():
    assert proposal("tran", ["train", "eval"]) == "did you mean train?"
    assert proposal("zzz", ["train", "eval"]) == "choose train or eval"
    assert [any_of("abc"[:count]) for count in range(4)] == ["", "a", "a or b", "a, b or c"]


def test_a_mistake_of_the_user_is_a_value_error_and_a_failed_run_is_none():
    assert issubclass(UserError, ValueError) and not issubclass(RunFailed, ValueError)
    assert RunInterrupted("stopped", exit_code=130).exit_code == 130


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'neuclip[x]'"),
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, "pip install -e '/a b[x]'"),
        ({"url": "file:///a", "dir_info": {}}, "pip install '/a[x]'"),
        ({"url": "file://{tmp}", "dir_info": {}}, "pip install -c {tmp}/constraints.txt '{tmp}[x]'"),
        ({"url": "file:///n.whl", "archive_info": {}}, "pip install 'neuclip[x] @ file:///n.whl'"),
        (
            {"url": "https://h/n.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'neuclip[x] @ git+https://h/n.git@abc'",
        ),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came_from(tmp_path, monkeypatch, origin, command):
    info = tmp_path / "neuclip-0.1.dist-info"
    info.mkdir()
    (tmp_path / "constraints.txt").touch()  # of a clone: the extra keeps to them
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: neuclip\nVersion: 0.1\n")
    if origin:
        (info / "direct_url.json").write_text(json.dumps(origin).replace("{tmp}", str(tmp_path)))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert install_command("x") == command.replace("{tmp}", str(tmp_path))
    with pytest.raises(UserError, match=r"^log\.x needs nothing_of_this_name; install with: pip install "):
        require("log.x", "json", "nothing_of_this_name", extra="x")
