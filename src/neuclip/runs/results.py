"""What a run writes about itself: evaluations on the way, and at the end figures, gallery, model, summary, report.

The main rank measures and writes while the others wait.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neuclip.data.faults import count_unindexed
from neuclip.data.held_out import HeldOutSets, named
from neuclip.data.sample import Fault
from neuclip.distributed.error_sync import on_main_rank
from neuclip.evaluation.embedding import Embedder
from neuclip.evaluation.gallery import gallery
from neuclip.evaluation.runner import Evaluation, evaluate_held_out
from neuclip.models.config import longer_context
from neuclip.models.export import export_model
from neuclip.objectives.objective import Objective
from neuclip.records import HELD_OUT, append_line, keep_lines, read_lines, write_json
from neuclip.report.contents import late_median
from neuclip.report.page import write_report
from neuclip.runs.environment import peak_memory_bytes
from neuclip.runs.error import error_is_due, estimator_errors, measure_error, whole_objective
from neuclip.runs.summary import headline_text, summary_text
from neuclip.settings.sections import Settings
from neuclip.training.batches import open_fault_log
from neuclip.training.run import Run

MATCHES_SHOWN = 5  # per query of the gallery


def open_held_out(settings: Settings) -> HeldOutSets:
    """Collective. Before the run starts: a set that cannot be opened is found now. Only the main rank has them."""

    def open_sets() -> HeldOutSets:
        wanted = settings.evaluation
        if settings.data.train in [named(address)[1] for address in wanted.retrieval]:
            warning = "evaluation.retrieval names the training data: recall on it says nothing about unseen images"
            print(warning, file=sys.stderr)
        return HeldOutSets.open(settings)

    return on_main_rank(open_sets) or HeldOutSets({}, {})


def evaluate_on_the_way(run: Run, sets: HeldOutSets) -> None:
    """Collective. One line in evaluation.jsonl, and one for the user."""
    objective = whole_objective(run) if error_is_due(run) else None

    def evaluate() -> None:
        errors = estimator_errors(measure_error(run, objective)) if objective else {}
        evaluation = record_evaluation(run, sets, errors)
        if evaluation.figures:
            headline = headline_text(evaluation.figures, evaluation.refused)
            print(f"at {run.samples:,} samples: {headline}", file=sys.stderr)

    on_main_rank(evaluate)


def finish(run: Run, sets: HeldOutSets) -> None:
    """Collective. Everything that a finished run leaves behind."""
    seconds = run.seconds
    objective = whole_objective(run) if run.settings.evaluation.error_anchors else None
    on_main_rank(lambda: write_results(run, sets, objective, seconds))


def write_results(run: Run, sets: HeldOutSets, objective: Objective | None, seconds: float) -> None:
    export_model(run.built, run.folder.model)  # first: whatever fails below, there is a model
    evaluation = record_evaluation(run, sets)
    summary = summarise(run, evaluation, seconds)
    if objective:
        summary["normalizer_error"] = measure_error(run, objective)
    if evaluation.embedded and run.settings.evaluation.gallery:
        write_gallery(run, sets, evaluation)
    write_json(run.folder.summary, summary)
    page = write_report(run.folder)
    tokens = 2 * run.built.config["text_cfg"].get("context_length", 77)  # how long the captions are was not counted
    longer = longer_context(run.settings.model.name, tokens)
    print(summary_text(summary, batch_size=run.plan.batch_size, longer_context=longer))
    print(f"Report: {page}")


def record_evaluation(run: Run, sets: HeldOutSets, errors: dict[str, float] | None = None) -> Evaluation:
    """Measure, and write one line, with the normalizer `errors` if they were measured too."""
    settings = run.settings
    embedder = Embedder(
        run.built, settings.evaluation.batch_size, settings.data.workers, max_bad_share=settings.data.max_bad_share
    )
    evaluation = evaluate_held_out(embedder, sets)
    figures = evaluation.figures | (errors or {})
    if figures:
        # A finished run that is resumed is measured again at the same place.
        keep_lines(run.folder.evaluation, lambda record: record["samples"] < run.samples)
        append_line(run.folder.evaluation, {"samples": run.samples, "step": run.step, **figures})
    list_faults(run.folder.skipped, evaluation.faults)
    return evaluation


def list_faults(path: Path, faults: Mapping[str, Sequence[Fault]]) -> None:
    """Add the faults of each set to a run's skipped.jsonl, except those that earlier evaluations listed."""
    lines = [json.dumps(fault._asdict() | {HELD_OUT: name}) + "\n" for name, ours in faults.items() for fault in ours]
    if not lines:
        return
    with path.open("a+", encoding="utf-8") as file:
        file.seek(0)
        known = {line for line in file if f'"{HELD_OUT}": ' in line}
        file.writelines(line for line in lines if line not in known)


def write_gallery(run: Run, sets: HeldOutSets, evaluation: Evaluation) -> None:
    """Queries of the first retrieval set that was measured, for the report."""
    name, pairs = next(iter(evaluation.embedded.items()))
    count, seed = run.settings.evaluation.gallery, run.settings.run.seed
    shown = gallery(pairs, sets.retrieval[name], count=count, top=MATCHES_SHOWN, seed=seed)
    write_json(run.folder.gallery, shown | {"dataset": name})


def summarise(run: Run, evaluation: Evaluation, seconds: float) -> dict[str, Any]:
    """What summary.json holds."""
    records = read_lines(run.folder.records)
    skipped, lost = open_fault_log(run).counts, count_unindexed(run.source)
    return {
        "samples_seen": run.samples,
        "loss": records[-1].get("loss") if records else None,
        "temperature": run.temperature,
        "calibration": late_median(records, "calibration"),
        "seconds": seconds,  # of training, with the evaluations on the way and without the last one
        "samples_per_second": run.samples / seconds,
        "peak_memory_bytes": peak_memory_bytes(run.device),
        "truncated_captions": records[-1].get("truncated_captions") if records else None,
        "skipped": dict(skipped.most_common()),
        # Of the different samples that were read; pairs that could not be indexed were not among them.
        "skipped_share": (skipped.total() - lost) / min(run.samples, len(run.source)),
        "lost_share": lost / (len(run.source) + lost),
        "skipped_held_out": evaluation.skipped,
        "not_measured": evaluation.refused,
        "evaluation": evaluation.figures,
    }
