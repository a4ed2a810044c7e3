"""`neuclip error`"""

from __future__ import annotations

from collections.abc import Sequence

from neuclip.cli.flags import JSON, Command, Flag
from neuclip.cli.runs import find_run
from neuclip.cli.tables import nested_table, print_json
from neuclip.settings.fields import check_at_least

ANCHORS = 10_000  # as in the paper
SEED = 0

COMMAND = Command(
    usage="error RUN [--anchors N] [--checkpoint NAME]",
    about="""Compares the run's normalizers with the exact ones, computed over its whole training data.
Prints the mean squared error of their logarithms, for images, for texts and on average; smaller is better.""",
    flags=(
        Flag("anchors", int, f"pairs whose normalizers are computed exactly [default: {ANCHORS}]"),
        Flag("seed", int, f"seed that chooses the anchors [default: {SEED}]"),
        Flag("checkpoint", str, "file name in the run's folder of checkpoints [default: the last]"),
        JSON,
    ),
    examples=("neuclip error runs/first", "neuclip error runs/first --anchors 2000 --seed 1 --json"),
)


def run(arguments: Sequence[str]) -> int:
    (name,), flags = COMMAND.parse(arguments)
    folder = find_run(name)
    values = {"anchors": ANCHORS, "seed": SEED, **flags}
    check_at_least("--anchors", values["anchors"], 1, f"the paper uses {ANCHORS}")
    as_json = values.pop(JSON.name, False)
    from neuclip import api

    errors = api.normalizer_error(folder.path, **values)
    if as_json:
        print_json(errors)
    else:
        print("mean squared error of the log-normalizers (0 is exact): this run's method, and a batch of its size")
        print(nested_table(errors.pop("estimators") | errors), end="")
    return 0
