"""`neuclip merge`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from neuclip.cli.eval import check_target
from neuclip.cli.flags import Command, Flag
from neuclip.cli.tables import aligned
from neuclip.errors import UserError
from neuclip.formatting import percent
from neuclip.progress import waiting
from neuclip.records import RunFolder

WEIGHT = 0.5

COMMAND = Command(
    usage="merge BASE RUN [FOLDER] [--weight 0.5]",
    about="""Writes the model between one that was fine-tuned and the result (WiSE-FT), as an open_clip folder.
It often keeps most of what BASE knew and of what RUN learnt. BASE and RUN: runs, checkpoints or local-dir:FOLDER.""",
    flags=(
        Flag("weight", float, f"share of RUN: 0 is BASE, 1 is RUN [default: {WEIGHT}]"),
        Flag("curve", bool, "write no model, but measure RUN's held-out sets at 0, 0.1, ... 1, into its merge.jsonl"),
    ),
    examples=(
        "neuclip merge local-dir:start runs/tuned --curve",
        "neuclip merge runs/a runs/b --weight 0.3 merged",
    ),
    fewest=2,
    most=3,
)


def run(arguments: Sequence[str]) -> int:
    (base, tuned, *given), values = COMMAND.parse(arguments)
    weight = values.get("weight", WEIGHT)
    if not 0 <= weight <= 1:
        raise UserError(f"--weight is {weight}; give a share from 0 (BASE) to 1 (RUN)")
    check_target(base)
    check_target(tuned)
    if values.get("curve"):
        if given or "weight" in values:
            raise UserError("--curve measures at every weight and writes no model; leave out --weight and the folder")
        return print_curve(base, tuned)
    with waiting("loading torch"):
        from neuclip.runs.merge import merge
    from neuclip.runs.new_folder import result_folder

    folder = result_folder(tuned, given[0] if given else "", f"merged-{weight:g}")
    merge(base, tuned, weight, folder)
    print(f"local-dir:{folder}")
    return 0


def print_curve(base: str, tuned: str) -> int:
    """One row per weight: recall@1 in both directions, or top-1 accuracy, of each held-out set. The report draws it."""
    with waiting("loading torch"):
        from neuclip.runs.merge import measure_curve
    from neuclip.report.run_report import write_report

    lines = measure_curve(base, tuned)
    shown = [
        key for key in lines[0] if key.endswith((".image_to_text_recall_at_1", ".text_to_image_recall_at_1", ".top1"))
    ]
    rows = [[f"{line['weight']:g}", *(percent(line.get(key)) for key in shown)] for line in lines]
    print(aligned([["weight", *shown], *rows]), end="")
    print(f"Report: {write_report(RunFolder(tuned))}", file=sys.stderr)
    return 0
