"""What a run writes about itself: evaluations on the way, and at the end figures, gallery, model, summary, report.

All ranks measure, the main rank writes.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.data.faults import count_unindexed
from neuclip.data.held_out import HeldOutSets, named
from neuclip.data.mixture import Selection
from neuclip.data.open import open_as
from neuclip.data.source import Fault, fingerprint
from neuclip.distributed.collectives import all_gather_object, gather_values, is_main, world_size
from neuclip.distributed.error_sync import main_rank_first, on_main_rank, raise_on_main
from neuclip.errors import UserError
from neuclip.evaluation.embedding import Embedder
from neuclip.evaluation.gallery import gallery
from neuclip.evaluation.held_out import Evaluation, evaluate_held_out
from neuclip.formatting import plural
from neuclip.models.config import longer_context
from neuclip.models.export import export_model
from neuclip.records import HELD_OUT, append_line, keep_lines, read_lines, write_json
from neuclip.report.contents import late_median
from neuclip.report.run_report import write_report
from neuclip.runs.environment import peak_memory_bytes
from neuclip.runs.error import error_figures, measure_error
from neuclip.runs.summary import headline_text, summary_text
from neuclip.settings.sections import Settings
from neuclip.training.batches import open_fault_log
from neuclip.training.run import Run

MATCHES_SHOWN = 5  # per query of the gallery


def open_held_out(settings: Settings) -> HeldOutSets:
    """Collective. Before the run starts: a set that cannot be opened is found now."""
    sets = main_rank_first(lambda: HeldOutSets.open(settings))
    trained_on = [name for name, path in map(named, settings.evaluation.retrieval) if path == settings.data.train]
    if is_main() and trained_on:  # of one file the training may be another split
        training, held_out = open_as(settings.data.train, settings.data), [sets.retrieval[name] for name in trained_on]
        ungrouped = [held.source if isinstance(held, Selection) else held for held in held_out]
        same_captions = [held for held in ungrouped if fingerprint(held) == fingerprint(training)]
        if any(held.images_version() == training.images_version() for held in same_captions):
            warning = "evaluation.retrieval names the training data: recall on it says nothing about unseen images"
            print(warning, file=sys.stderr)
    sources = (*sets.retrieval.values(), *(task.source for task in sets.zero_shot.values()))
    sizes = all_gather_object([len(source) for source in sources])  # each rank embeds a part of every set
    if any(other != sizes[0] for other in sizes):
        seen = "; ".join(f"rank {number} sets of {own} samples" for number, own in enumerate(sizes))
        raise_on_main(UserError(f"ranks see different held-out data: {seen}; give all of them the same files"))
    return sets


def print_held_out(sets: HeldOutSets) -> None:
    """What a run will be measured on, while there is time to stop it: a set read wrongly is seen by its captions."""
    if not is_main():
        return
    sizes = {name: str(fingerprint(source)[1]) for name, source in sets.retrieval.items()}
    for name, task in sets.zero_shot.items():
        sizes[name] = f"{plural(len(task.source), 'image')} of {plural(len(task.classnames), 'class', 'classes')}"
    for name, size in sizes.items():
        print(f"  held out {name}: {size}", file=sys.stderr)


def evaluate_on_the_way(run: Run, sets: HeldOutSets) -> None:
    """Collective. One line in evaluation.jsonl, and one for the user."""
    evaluation, _ = record_evaluation(run, sets)
    if evaluation.figures and is_main():
        headline = headline_text(evaluation.figures, evaluation.refused)
        print(f"at {run.samples:,} samples: {headline}", file=sys.stderr)


def finish(run: Run, sets: HeldOutSets) -> None:
    """Collective. Everything that a finished run leaves behind."""
    seconds = run.seconds
    on_main_rank(lambda: export_model(run.built, run.folder.model))  # first: whatever fails below, there is a model
    evaluation, errors = record_evaluation(run, sets)
    on_main_rank(lambda: write_results(run, sets, evaluation, errors, seconds))


def write_results(
    run: Run, sets: HeldOutSets, evaluation: Evaluation, errors: dict[str, Any] | None, seconds: float
) -> None:
    summary = summarise(run, evaluation, seconds)
    if errors:
        summary["normalizer_error"] = errors
    if evaluation.embedded and run.settings.evaluation.gallery:
        write_gallery(run, sets, evaluation)
    write_json(run.folder.summary, summary)
    page = write_report(run.folder)
    tokens = 2 * run.built.config["text_cfg"].get("context_length", 77)  # how long the captions are was not counted
    longer = longer_context(run.settings.model.name, tokens)
    print(summary_text(summary, batch_size=run.plan.batch_size, longer_context=longer))
    print(f"Report: {page}")
    if folder := run.source.folder:
        print(f"Search: neuclip search {run.folder.path} {shlex.quote(str(folder))} 'your words'")


def record_evaluation(run: Run, sets: HeldOutSets) -> tuple[Evaluation, dict[str, Any] | None]:
    """Collective. Measure on all ranks and write one line: the held-out figures and, with evaluation.error_anchors, the
    normalizer error, both of the model that is exported."""
    settings = run.settings
    embedder = Embedder(
        run.built, settings.evaluation.batch_size, settings.data.workers, max_bad_share=settings.data.max_bad_share
    )
    with statistics_of_main_rank(run.built.towers):
        evaluation = evaluate_held_out(embedder, sets)
        errors = measure_error(run) if run.step and settings.evaluation.error_anchors else None

    def write() -> None:
        if figures := evaluation.figures | (error_figures(errors) if errors else {}):
            # A finished run that is resumed is measured again at the same place.
            keep_lines(run.folder.evaluation, lambda record: record["samples"] < run.samples)
            append_line(run.folder.evaluation, {"samples": run.samples, "step": run.step, **figures})
        list_faults(run.folder.skipped, evaluation.faults)

    on_main_rank(write)
    return evaluation, errors


@contextmanager
def statistics_of_main_rank(towers: nn.Module) -> Iterator[None]:
    """Collective. Inside, BatchNorm normalizes on every rank by the running statistics of the main rank, whose model is
    the one that is exported: each rank has those of its own batches."""
    norms = [module for module in towers.modules() if isinstance(module, _BatchNorm)]
    own = [buffer for norm in norms for buffer in norm.buffers()] if world_size() > 1 else []
    kept = [buffer.clone() for buffer in own]
    for buffer in own:
        buffer.copy_(gather_values(buffer[None])[0])
    try:
        yield
    finally:
        for buffer, before in zip(own, kept, strict=True):
            buffer.copy_(before)


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
        "storing": storing_times(run),
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
        "evaluation_at_start": figures_at_start(run),
    }


def storing_times(run: Run) -> dict[str, Any]:
    """Of stored features: seconds that storing took in this run; empty without them."""
    return {} if run.storing is None else {"towers": run.storing.sides, "seconds": run.storing.seconds}


def figures_at_start(run: Run) -> dict[str, float]:
    """What evaluation.at_start measured before the first step; empty without it."""
    first = next(iter(read_lines(run.folder.evaluation)), {})
    return {} if first.get("samples") else {key: x for key, x in first.items() if key not in ("samples", "step")}
