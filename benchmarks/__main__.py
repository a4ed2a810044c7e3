"""Compares neuclip's cost with that of other libraries, in one table of ratios.

    python -m benchmarks                          # all rows: about half an hour on one core, 3 GB
    python -m benchmarks losses inner --rounds 9  # some of them
    python -m benchmarks --list

Each row is measured in turns with its peer, with one thread, and the best of the rounds counts. Run it on a machine
that is otherwise free. A ratio above its goal is marked MISSED.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator

import torch

from benchmarks import evaluation, loading, objectives
from benchmarks.table import HEADER, Row, measure

ROWS: dict[str, Callable[[], Iterator[Row]]] = {
    "losses": objectives.losses,
    "inner": objectives.inner_steps,
    "memory": objectives.memory,
    "loader": loading.loaders,
    "step": loading.training_steps,
    "normalizers": evaluation.exact_normalizers,
    "evaluation": evaluation.against_clip_benchmark,
}
ONCE = {"memory", "step", "evaluation"}  # rows that repeat their measurement themselves, or that do not vary


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"rows to measure, of {', '.join(ROWS)}; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; the rows are {', '.join(ROWS)}")
    if arguments.list:
        print("\n".join(ROWS))
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(HEADER, flush=True)
    missed = False
    for name in arguments.rows or ROWS:
        torch.manual_seed(0)
        for row in ROWS[name]():
            line = measure(row, rounds=1 if name in ONCE else arguments.rounds)
            missed |= line.endswith("MISSED |")
            print(line, flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
