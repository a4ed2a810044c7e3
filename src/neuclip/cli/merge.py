"""`neuclip merge`"""

from __future__ import annotations

from collections.abc import Sequence

from neuclip.cli.eval import check_target
from neuclip.cli.flags import Command, Flag
from neuclip.errors import UserError
from neuclip.progress import waiting

WEIGHT = 0.5

COMMAND = Command(
    usage="merge BASE RUN [FOLDER] [--weight 0.5]",
    about="""Writes the model between one that was fine-tuned and the result (WiSE-FT), as an open_clip folder.
It often keeps most of what BASE knew and of what RUN learnt. BASE and RUN: runs, checkpoints or local-dir:FOLDER.""",
    flags=(Flag("weight", float, f"share of RUN: 0 is BASE, 1 is RUN [default: {WEIGHT}]"),),
    examples=("neuclip merge local-dir:start runs/tuned", "neuclip merge runs/first runs/tuned --weight 0.3 merged"),
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
    with waiting("loading torch"):
        from neuclip.runs.merge import merge
    from neuclip.runs.new_folder import result_folder

    folder = result_folder(tuned, given[0] if given else "", f"merged-{weight:g}")
    merge(base, tuned, weight, folder)
    print(f"local-dir:{folder}")
    return 0
