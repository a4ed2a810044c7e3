"""A command is one function and one line in a table: what its signature and docstring promise can be typed."""

from __future__ import annotations

import functools
import inspect
import shlex
from importlib import import_module
from typing import Literal

import pytest

from neuclip.cli.command import Count, Share
from neuclip.cli.main import COMMANDS, main
from neuclip.settings.paper import paper_objectives, paper_settings
from neuclip.settings.reading import read_settings, shipped_recipes


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


FUNCTIONS = {}


def function_of(name: str):
    """That of the package, also after it was replaced."""
    module, _, function = FUNCTIONS.setdefault(name, COMMANDS[name][0]).partition(".")
    return getattr(import_module(f"neuclip.cli.{module}"), function)


@pytest.fixture
def typed(add_command):
    """Types a command line; what its function would have been called with."""

    def type_(line: str, function=None) -> inspect.BoundArguments | None:
        calls: list[inspect.BoundArguments] = []
        words = shlex.split(line)
        name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
        real = function or function_of(name)

        @functools.wraps(real)
        def recorded(*operands, **values) -> int:
            calls.append(inspect.signature(real).bind(*operands, **values))
            return 0

        add_command(name, recorded)
        assert main(words) == 0 or not calls
        return calls[0] if calls else None

    return type_


def test_flags_have_the_types_and_limits_of_their_parameters(typed):
    found = typed("draw cats --to wall --fast dogs --data.key x,y --with 'a pen' --share=1 --size 10k --json", draw)
    assert found.args == ("cats", "dogs")
    assert found.kwargs == {
        **{"to": "wall", "fast": True, "data_key": ("x", "y"), "with_": "a pen"},
        **{"share": 1.0, "size": 10_000, "json": True},
    }
    assert typed("draw cats --to wall --fast=false", draw).kwargs == {"to": "wall", "fast": False}
    assert typed("draw cats --to wall --data.key x --data.key y,z", draw).kwargs["data_key"] == ("x", "y", "z")
    assert typed("draw cats --to wall --size 4 --size 5", draw).kwargs["size"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--to wall", "an argument is missing; usage: neuclip draw WHAT..."),
        ("cats", "--to is missing; usage: neuclip draw WHAT..."),
        ("cats --to wal", "--to is 'wal'; choose paper or wall (did you mean wall?)"),
        ("cats --to wall --size 0", "--size is 0; give 1 or more"),
        ("cats --to wall --share 1.5", "--share is 1.5; give 0 or more and at most 1"),
        ("cats --to wall --share half", "--share is 'half'; give a number"),
        ("cats --to", "--to is empty; choose paper or wall"),
        ("cats --to wall --data.kye x", "no flag --data.kye; did you mean --data.key?"),
        ("cats --fats --to wall", "no flag --fats; did you mean --fast?"),
        ("cats --train.samples 3", "the flags are --size, --share, --to, --with, --data.key, --fast, --json"),
        ("cats -x --to wall", "no flag '-x'"),
    ],
)
def test_invalid_arguments_are_refused(typed, capsys, arguments, message):
    assert typed(f"draw {arguments}", draw) is None
    assert message in capsys.readouterr().err


def test_the_help_page_is_the_docstring_with_types_and_defaults(typed, capsys):
    typed("draw --help", draw)
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        *("usage: neuclip draw WHAT... --to paper|wall", "", "Draws.", ""),
        *("--size N how large [default: 3]", "--share X how much [default: 0.5]", "--to paper|wall where"),
        *("--with TEXT a second one, and more words", "--data.key TEXT,... keys [default: a,b]", "--fast be quick"),
        *("--json print the result as JSON on stdout", "", "example:", "neuclip draw cats --to wall"),
    ]


def test_a_command_with_settings_passes_them_on_and_keeps_its_own_flags(typed):
    found = typed("train tiny --run.seed 3 --json --log.wandb")
    assert found.args == ("tiny",)
    assert found.kwargs == {"json": True, "settings": ["--run.seed=3", "--log.wandb"]}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_page_has_all_flags_and_examples_that_can_be_typed(name, typed, capsys):
    assert main([*name.split(), "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: neuclip {name}") and max(map(len, page.splitlines())) <= 120
    for one in inspect.signature(function_of(name)).parameters.values():
        dashes = one.name.rstrip("_").replace("_", "-")
        names = (dashes, one.name.replace("_", ".", 1))  # --batch-size, --data.caption_key
        assert one.kind is not one.KEYWORD_ONLY or one.name == "settings" or any(f"\n  --{x}" in page for x in names)
    examples = page[page.index("\nexample") :].splitlines()[2:]
    assert examples and all(line.startswith(f"  neuclip {name} ") for line in examples)
    for example in examples:
        given = typed(example.removeprefix("  neuclip ")).arguments
        read_settings(None, given.get("settings", []))


@pytest.mark.parametrize("name", ["train", "doctor", "recipe"])
def test_help_pages_name_all_recipes_or_all_settings_and_objectives_of_the_paper(name, capsys):
    main([name, "--help"])
    about = " ".join(capsys.readouterr().out.split())
    assert f"({', '.join(paper_settings() if name == 'recipe' else shipped_recipes())})" in about
    assert name != "recipe" or all(objective in about for objective in paper_objectives())
