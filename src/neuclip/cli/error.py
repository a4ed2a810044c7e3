"""`neuclip error`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from neuclip.cli.flags import JSON, Command, Flag
from neuclip.cli.runs import find_run
from neuclip.cli.tables import aligned, print_json
from neuclip.errors import UserError
from neuclip.formatting import UNKNOWN, format_count, format_number, percent, plural
from neuclip.report.findings import judge_error

ANCHORS, SEED, CHECKPOINTS = 10_000, 0, "5"  # the first and the last as in the paper

COMMAND = Command(
    usage="error RUN... [--eps X] [--anchors N] [--checkpoints all|last|N]",
    about="""Compares the runs' normalizers with the exact ones, computed over their whole training data.
Prints the mean squared error of their logarithms at the same anchors, with one eps for all, at equal numbers of
samples seen; smaller is better. Checkpoints to compare are kept by --checkpoint.milestones of `neuclip train`.""",
    flags=(
        Flag(
            "eps",
            float,
            "added to every normalizer, inside the logarithm [default: the largest of the runs' own]",
            at_least=0,
        ),
        Flag("anchors", int, f"pairs whose normalizers are computed exactly [default: {ANCHORS}]", at_least=1),
        Flag(
            "checkpoints",
            str,
            "of those that all runs have at the same number of samples: all, last, or so many, evenly spaced "
            f"[default: {CHECKPOINTS}]",
        ),
        Flag("seed", int, f"seed that chooses the anchors [default: {SEED}]"),
        JSON,
    ),
    examples=(
        "neuclip error runs/neuclip runs/fastclip runs/clip",
        "neuclip error runs/first --checkpoints last --anchors 2000 --json",
    ),
    most=1000,
)


def run(arguments: Sequence[str]) -> int:
    names, flags = COMMAND.parse(arguments)
    folders = [find_run(name) for name in names]
    places = [folder.path.resolve() for folder in folders]
    if twice := [name for name, place in zip(names, places, strict=True) if places.count(place) > 1]:
        raise UserError(f"{twice[0]} is given twice; give each run once")
    values = {"anchors": ANCHORS, "seed": SEED, "checkpoints": CHECKPOINTS, **flags}
    check_checkpoints(values["checkpoints"])
    as_json = values.pop(JSON.name, False)
    from neuclip import api

    errors = api.normalizer_errors([folder.path for folder in folders], **values)
    measured, wanted = len(errors["runs"][0]["checkpoints"]), values["checkpoints"]
    if wanted.isdecimal() and measured < int(wanted):
        print(
            f"{measured} of {plural(int(wanted), 'checkpoint')} measured: there are no more at equal numbers of "
            f"samples; train with --checkpoint.milestones {wanted} to keep them",
            file=sys.stderr,
        )
    if as_json:
        print_json(errors)
    else:
        print(error_text(errors), end="")
    return 0


def check_checkpoints(value: str) -> None:
    if value not in ("all", "last") and not (value.isdecimal() and int(value)):
        raise UserError(f"--checkpoints is {value!r}; give all, last, or a number such as 5")


NOTES = """restart: steps since the last one; held: anchors whose own features it stored
unique: without anchors that share their caption with another pair, which is hardly ever in their batch
at floor: exact normalizers within a factor e of eps, where eps decides and no method can be wrong
"""


def error_text(errors: dict[str, Any]) -> str:
    """What was measured, a line per run, a judgement per run, and a line per checkpoint."""
    runs = errors["runs"]
    shared = max(found["duplicates"] for run in runs for found in run["checkpoints"])
    head = (
        "mean over anchors of (log estimate - log exact normalizer)^2, images and texts averaged; 0 is exact\n"
        f"eps {format_number(errors['eps'])} for all; {plural(errors['anchors'], 'anchor')} (seed {errors['seed']}), "
        f"{format_count(shared)} with a caption that another pair has; "
        f"{plural(len(runs[0]['checkpoints']), 'checkpoint')}, at equal numbers of samples\n"
    )
    for run in runs:
        if run["own_eps"] != errors["eps"]:
            head += f"{run['run']} was trained with eps {format_number(run['own_eps'])}\n"
    return "\n".join([head, aligned(summary_rows(runs)), judgements(runs), aligned(checkpoint_rows(runs)), NOTES])


def summary_rows(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = [["run", "objective", "batch", "error", "at the last", "of a batch", "at the last"]]
    for run in runs:
        last = run["checkpoints"][-1]["estimators"]
        figures = [
            figure
            for name in ("method", "minibatch")
            for figure in (run["mean"].get(name), last.get(name, {}).get("mean"))
        ]
        rows.append([run["run"], run["objective"], format_count(run["batch_size"]), *map(format_number, figures)])
    return rows


def judgements(runs: Sequence[dict[str, Any]]) -> str:
    lines = []
    for run in runs:
        notes = [found["method_note"] for found in run["checkpoints"] if "method_note" in found]
        judged = judge_error(run["mean"].get("method"), run["mean"]["minibatch"])
        said = f"the error is {judged}" if judged else (notes or ["nothing to judge"])[0]
        lines.append(f"{run['run']}: {said}\n")
    return "".join(lines)


def checkpoint_rows(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """By run; columns that no run has anything to say in are left out."""
    head = ["samples", "restart", "tau", "image", "text", "error", "unique", "not held", "held", "no estimate"]
    rows = [[*head, "of a batch", "unique", "at floor"]]
    for run in runs:
        rows.append([run["run"]])
        for found in run["checkpoints"]:
            method, batch = (found["estimators"].get(name, {}) for name in ("method", "minibatch"))
            keys = ("image", "text", "mean", "mean_without_duplicates", "mean_without_held")
            rows.append(
                [
                    f"  {format_count(found['samples'])}",
                    format_count(found.get("steps_since_restart")),
                    format_number(found["temperature"]),
                    *(format_number(method.get(key)) for key in keys),
                    format_count(found.get("held")),
                    format_count(method.get("without_estimate")),
                    *(format_number(batch.get(key)) for key in ("mean", "mean_without_duplicates")),
                    percent(found["share_at_floor"]),
                ]
            )
    said = [any(row[column] != UNKNOWN for row in rows[1:] if len(row) > 1) for column in range(len(rows[0]))]
    return [[cell for cell, kept in zip(row, said, strict=False) if kept] for row in rows]
