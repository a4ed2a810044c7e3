"""A command is a function: what its signature and docstring promise is what the user can type."""

from __future__ import annotations

import functools
import inspect
import shlex
from importlib import import_module
from typing import Literal

import pytest

from neuclip.cli.command import SETTINGS, Count, Share, call, flags_of, help_page, read_page
from neuclip.cli.main import COMMANDS, main
from neuclip.errors import UserError
from neuclip.settings.paper import paper_objectives, paper_settings
from neuclip.settings.reading import read_settings, shipped_recipes


def function_of(name: str):
    module, _, function = COMMANDS[name][0].partition(".")
    return getattr(import_module(f"neuclip.cli.{module}"), function)


def typed(command, arguments: str) -> inspect.BoundArguments:
    """What the function would be called with."""
    calls = []

    @functools.wraps(command)
    def recorded(*operands, **values) -> int:
        calls.append(inspect.signature(command).bind(*operands, **values))
        return 0

    assert call(recorded, shlex.split(arguments)) == 0
    return calls[0]


def draw(
    what: str,
    *others: str,
    size: Count = 3,
    share: Share = 0.5,
    to: Literal["paper", "wall"],
    with_: str = "",
    data_key: tuple[str, ...] = ("a", "b"),
    fast: bool = False,
    json: bool = False,
) -> int:
    """neuclip draw WHAT... --to paper|wall

    Draws.

    --size: how large
    --share: how much
    --to: where
    --with: a second one,
        and more words
    --data.key: keys
    --fast: be quick

    neuclip draw cats --to wall
    """
    raise AssertionError


def test_flags_have_the_types_and_limits_of_their_parameters():
    found = typed(draw, "cats --to wall --fast dogs --data.key x,y --with 'a pen' --share=1 --size 10k --json")
    assert found.args == ("cats", "dogs")
    assert found.kwargs == {
        **{"to": "wall", "fast": True, "data_key": ("x", "y"), "with_": "a pen"},
        **{"share": 1.0, "size": 10_000, "json": True},
    }
    assert typed(draw, "cats --to wall --fast=false").kwargs == {"to": "wall", "fast": False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--to wall", "an argument is missing; give neuclip draw WHAT..."),
        ("cats", "--to is missing; give neuclip draw WHAT..."),
        ("cats --to wal", r"--to is 'wal'; choose paper or wall \(did you mean wall\?\)"),
        ("cats --to wall --size 0", "--size is 0; give 1 or more"),
        ("cats --to wall --share 1.5", "--share is 1.5; give 0 or more and at most 1"),
        ("cats --to wall --share half", "--share is 'half'; give a number"),
        ("cats --to", "--to is empty; choose paper or wall"),
        ("cats --to wall --data.kye x", r"no flag --data.kye; did you mean --data.key\?"),
        ("cats --fats --to wall", r"no flag --fats; did you mean --fast\?"),
        ("cats --train.samples 3", "the flags are --size, --share, --to, --with, --data.key, --fast, --json"),
        ("cats -x --to wall", "no flag '-x'"),
    ],
)
def test_what_cannot_be_passed_on_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        call(draw, arguments.split())


def test_the_help_page_is_the_docstring_with_types_and_defaults():
    rows = [" ".join(line.split()) for line in help_page(draw).splitlines()]
    assert rows == [
        *("usage: neuclip draw WHAT... --to paper|wall", "", "Draws.", ""),
        *("--size N how large [default: 3]", "--share X how much [default: 0.5]", "--to paper|wall where"),
        *("--with TEXT a second one, and more words", "--data.key TEXT,... keys [default: a,b]", "--fast be quick"),
        *("--json print the result as JSON on stdout", "", "example:", "neuclip draw cats --to wall"),
    ]


def test_a_command_with_settings_passes_them_on_and_keeps_its_own_flags():
    found = typed(function_of("train"), "tiny --run.seed 3 --json --log.wandb")
    assert found.args == ("tiny",)
    assert found.kwargs == {"json": True, "settings": ["--run.seed=3", "--log.wandb"]}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_page_has_all_flags_and_examples_that_can_be_typed(name, capsys):
    command = function_of(name)
    assert main([*name.split(), "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: neuclip {name}") and max(map(len, page.splitlines())) <= 120
    keywords = [one.name for one in inspect.signature(command).parameters.values() if one.kind is one.KEYWORD_ONLY]
    assert set(flags_of(command)) == set(keywords) - {SETTINGS}
    assert all(f"\n  --{flag.name}" in page for flag in flags_of(command).values())
    examples = read_page(command).examples
    assert f"\nexample{'s' if len(examples) > 1 else ''}:\n  {examples[0]}\n" in page
    for example in examples:
        assert f"\n  {example}\n" in page and example.startswith(f"neuclip {name} ")
        given = typed(command, example.removeprefix(f"neuclip {name} ")).arguments
        if SETTINGS in given:
            read_settings(None, given[SETTINGS])


def test_help_pages_name_all_recipes_settings_and_objectives():
    assert f"({', '.join(shipped_recipes())})" in read_page(function_of("train")).about[0]
    assert f"({', '.join(shipped_recipes())})" in read_page(function_of("doctor")).about[0]
    (about,) = read_page(function_of("recipe")).about
    assert f"({', '.join(paper_settings())})" in about
    assert all(objective in about for objective in paper_objectives())
