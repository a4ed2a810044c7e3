"""Every method on the same data, model and budget: tuned alike, then three seeds each, then one table.

    python -m benchmarks.comparison.compare --folder FOLDER --stage tune
    python -m benchmarks.comparison.compare --folder FOLDER --stage final --photos PHOTOS
    python -m benchmarks.comparison.compare --folder FOLDER --stage table > table.md

From the project's folder. It can be stopped and started again at any time: finished runs are skipped, others go on.
PHOTOS holds train/ and test/ with tar shards; without it only the built-in icons are compared.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from benchmarks.comparison.plan import (
    SELECTION,
    PlannedRun,
    choices,
    final_runs,
    held_out_recall,
    prepare_data,
    tuning_runs,
)
from benchmarks.comparison.processes import Timing, execute
from benchmarks.comparison.table import final_tables, tuning_table
from neuclip.errors import RunFailed, RunInterrupted, UserError
from neuclip.formatting import format_duration
from neuclip.records import write_json


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return {"tune": tune, "final": finish, "table": write_table}[options.stage](options)
    except (UserError, RunFailed, RunInterrupted) as error:
        print(error, file=sys.stderr)
        return error.exit_code if isinstance(error, RunInterrupted) else 2 if isinstance(error, UserError) else 1


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    described.add_argument("--folder", type=Path, required=True, help="holds the data, the runs and their logs")
    described.add_argument("--stage", choices=("tune", "final", "table"), required=True)
    described.add_argument("--photos", type=Path, help="folder with train/ and test/; final stage only")
    described.add_argument("--parallel", type=int, default=2, help="runs at a time, one thread each (default 2)")
    described.add_argument("--only", default="", help="only runs whose name holds this, such as icons-128-clip")
    described.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    return described


def tune(options: argparse.Namespace) -> int:
    options.folder = options.folder.absolute()
    prepare_data(options.folder, None)
    if carry_out(tuning_runs(), options) or options.dry_run or not all_done(tuning_runs(), options.folder):
        return report_missing(tuning_runs(), options)
    write_chosen(options.folder)
    return 0


def finish(options: argparse.Namespace) -> int:
    options.folder = options.folder.absolute()
    runs = final_runs(read_chosen(options.folder), photos=options.photos is not None)
    prepare_data(options.folder, options.photos)
    carry_out(runs, options)
    return report_missing(runs, options)


def write_table(options: argparse.Namespace) -> int:
    root = options.folder.absolute()
    print(tuning_table(tuning_runs(), root, SELECTION))
    if chosen_path(root).is_file():
        print(final_tables(final_runs(read_chosen(root), photos=True), root))
    return 0


def carry_out(runs: list[PlannedRun], options: argparse.Namespace) -> list[PlannedRun]:
    """Answers the runs that failed."""
    wanted = [run for run in runs if options.only in run.name]
    if not options.dry_run:
        return execute(wanted, options.folder, options.parallel)
    left = [run for run in wanted if not run.is_done(options.folder)]
    for run in left:
        print(shlex.join(["neuclip", *run.arguments(options.folder)]))
    about = format_duration(Timing().left(left, options.parallel))
    print(f"{len(left)} runs, {len(wanted) - len(left)} done; about {about}", file=sys.stderr)
    return []


def all_done(runs: list[PlannedRun], root: Path) -> bool:
    return all(run.is_done(root) for run in runs)


def report_missing(runs: list[PlannedRun], options: argparse.Namespace) -> int:
    missing = [run.name for run in runs if not run.is_done(options.folder)]
    if missing and not options.dry_run:
        print(f"{len(missing)} runs are not done, first of all {missing[0]}; the same command tries again")
    return 0 if options.dry_run or options.only else int(bool(missing))


def chosen_path(root: Path) -> Path:
    return root / "chosen.json"


def write_chosen(root: Path) -> None:
    """What the final stage reads, with what each choice reached on the held-out shard."""
    reached = {run.name: held_out_recall(run, root) for run in tuning_runs()}
    write_json(chosen_path(root), {"selection": SELECTION, "chosen": choices(root), "reached": reached})
    print(f"chosen by {SELECTION}: {chosen_path(root)}")


def read_chosen(root: Path) -> dict[str, int]:
    try:
        chosen: dict[str, int] = json.loads(chosen_path(root).read_text(encoding="utf-8"))["chosen"]
    except FileNotFoundError:
        raise UserError(f"{chosen_path(root)} is not there; run --stage tune to its end first") from None
    return chosen


if __name__ == "__main__":
    sys.exit(main())
