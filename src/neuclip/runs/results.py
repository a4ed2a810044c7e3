"""What a run writes about itself: evaluations on the way, and at the end figures, gallery, model, summary, report.

All ranks measure, the main rank writes.
"""

from __future__ import annotations

import shlex
from statistics import fmean
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.data.faults import count_unindexed
from neuclip.data.held_out import HeldOutSets
from neuclip.data.source import fingerprint
from neuclip.distributed.collectives import all_gather_object, gather_values, is_main, world_size
from neuclip.distributed.ranks import from_main_rank, main_rank_first, on_main_rank, raise_on_main
from neuclip.errors import UserError
from neuclip.evaluation.embedding import Embedder
from neuclip.evaluation.gallery import gallery
from neuclip.evaluation.held_out import Evaluation, evaluate_held_out
from neuclip.formatting import plural
from neuclip.machine import peak_memory_bytes
from neuclip.models.export import export_model
from neuclip.progress import say
from neuclip.records import append_line, keep_up_to, read_lines, write_json
from neuclip.report.contents import late_median
from neuclip.report.run_report import write_report
from neuclip.report.terminal import headline_text, summary_text
from neuclip.runs.advice import run_advice
from neuclip.runs.error import error_figures, measure_error
from neuclip.settings.sections import Settings
from neuclip.training.run import Run

MATCHES_SHOWN = 5  # per query of the gallery


def open_held_out(settings: Settings) -> HeldOutSets:
    """Collective. Before the run starts: a set that cannot be opened is found now."""
    sets = main_rank_first(lambda: HeldOutSets.open(settings))
    sources = (*sets.retrieval.values(), *(task.source for task in sets.zero_shot.values()))
    sizes = all_gather_object([len(source) for source in sources])  # each rank embeds a part of every set
    if any(other != sizes[0] for other in sizes):
        seen = "; ".join(f"rank {number} sets of {own} samples" for number, own in enumerate(sizes))
        raise_on_main(UserError(f"ranks see different held-out data: {seen}; give all of them the same files"))
    return sets


def say_before_training(run: Run, sets: HeldOutSets) -> None:
    """What a run will be measured on, while there is time to stop it: a set read wrongly is seen by its captions. And
    what the run should be told."""
    if not is_main():
        return
    for name, size in describe_held_out(sets).items():
        say(f"  held out {name}: {size}")
    for advice in run_advice(run, sets):
        say("{}: {}; {}".format(*advice))


def describe_held_out(sets: HeldOutSets) -> dict[str, str]:
    """By name, how large each set is."""
    sizes = {name: str(fingerprint(source)[1]) for name, source in sets.retrieval.items()}
    for name, task in sets.zero_shot.items():
        sizes[name] = f"{plural(len(task.source), 'image')} of {plural(len(task.classnames), 'class', 'classes')}"
    return sizes


def evaluate_on_the_way(run: Run, sets: HeldOutSets) -> None:
    """Collective. One line in evaluation.jsonl, and one for the user."""
    evaluation, _ = measure(run, sets)
    if evaluation.figures and is_main():
        say(f"at {run.samples:,} samples: {headline_text(evaluation.figures, evaluation.refused)}")


def evaluate_missed(run: Run, sets: HeldOutSets) -> None:
    """Collective. A run that was killed while it was evaluated has a checkpoint of that step, but not its figures."""
    every, before = run.settings.evaluation.every, run.samples - run.plan.batch_size
    due = every and 0 < run.step < run.plan.steps and run.samples // every > before // every
    lines = from_main_rank(lambda: read_lines(run.folder.evaluation)) if due else []
    if due and not any(line["samples"] == run.samples for line in lines):
        evaluate_on_the_way(run, sets)


def measure(run: Run, sets: HeldOutSets) -> tuple[Evaluation, dict[str, Any]]:
    """Collective. Held-out figures and, from the first step on, the normalizer error, if the run has anchors for it;
    all of it in one line of evaluation.jsonl. A finished run that is resumed is measured again at the same place."""
    settings = run.settings
    share_statistics(run)
    embedder = Embedder(
        run.built,
        settings.evaluation.batch_size,
        settings.data.workers,
        max_bad_share=settings.data.max_bad_share,
        stored=run.stored_sides,
    )
    evaluation = evaluate_held_out(embedder, sets)
    errors = measure_error(run) if settings.evaluation.error_anchors and run.step else {}

    def write() -> None:
        if figures := evaluation.figures | (error_figures(errors) if errors else {}):
            keep_up_to(run.folder.evaluation, run.samples - 1)
            append_line(run.folder.evaluation, {"samples": run.samples, "step": run.step, **figures})

    on_main_rank(write)
    return evaluation, errors


def share_statistics(run: Run) -> None:
    """Collective. The main rank's running statistics of BatchNorm on every rank: its model is the one that is exported.
    DDP would send them before the next step anyhow."""
    norms = [module for module in run.built.towers.modules() if isinstance(module, _BatchNorm)]
    for buffer in (buffer for norm in norms for buffer in norm.buffers()) if world_size() > 1 else ():
        buffer.copy_(gather_values(buffer[None])[0])


def finish(run: Run, sets: HeldOutSets) -> None:
    """Collective. Everything that a finished run leaves behind."""
    seconds = run.seconds
    on_main_rank(lambda: export_model(run.built, run.folder.model))  # first: whatever fails below, there is a model
    evaluation, errors = measure(run, sets)
    on_main_rank(lambda: write_results(run, sets, evaluation, errors, seconds))


def write_results(run: Run, sets: HeldOutSets, evaluation: Evaluation, errors: dict[str, Any], seconds: float) -> None:
    summary = summarise(run, evaluation, seconds) | ({"normalizer_error": errors} if errors else {})
    if evaluation.embedded and (count := run.settings.evaluation.gallery):
        name, pairs = next(iter(evaluation.embedded.items()))
        shown = gallery(pairs, sets.retrieval[name], count=count, top=MATCHES_SHOWN, seed=run.settings.run.seed)
        write_json(run.folder.gallery, shown | {"dataset": name})
    write_json(run.folder.summary, summary)
    page = write_report(run.folder)
    tokens = 2 * run.built.config["text_cfg"].get("context_length", 77)  # how long the captions are was not counted
    longer = f"give --model.context_length {tokens}"
    print(summary_text(summary, batch_size=run.plan.batch_size, longer_context=longer))
    print(f"Report: {page}")
    if folder := run.source.folder:
        print(f"Search: neuclip search {run.folder.path} {shlex.quote(str(folder))} 'your words'")


def summarise(run: Run, evaluation: Evaluation, seconds: float) -> dict[str, Any]:
    """What summary.json holds."""
    records, first = read_lines(run.folder.records), next(iter(read_lines(run.folder.evaluation)), {})
    truncated = [record["truncated_captions"] for record in records if record.get("truncated_captions") is not None]
    skipped, lost = run.faults.counts, count_unindexed(run.source)
    return {
        "samples_seen": run.samples,
        "loss": records[-1].get("loss") if records else None,
        "temperature": run.temperature,
        "calibration": late_median(records, "calibration"),
        "stored_features": run.stored,
        "seconds": seconds,  # of training, with the evaluations on the way and without the last one
        "samples_per_second": run.samples / seconds,
        "peak_memory_bytes": peak_memory_bytes(run.device),
        "truncated_captions": fmean(truncated) if truncated else None,
        "skipped": dict(skipped.most_common()),
        # Of the different samples that were read; pairs that could not be indexed were not among them.
        "skipped_share": (skipped.total() - lost) / min(run.samples, len(run.source)),
        "lost_share": lost / (len(run.source) + lost),
        "skipped_held_out": evaluation.skipped,
        "not_measured": evaluation.refused,
        "evaluation": evaluation.figures,
        # What evaluation.at_start measured before the first step.
        "evaluation_at_start": {} if first.get("samples", 1) else without_place(first),
    }


def without_place(line: dict[str, Any]) -> dict[str, Any]:
    """The figures of a line of evaluation.jsonl."""
    return {key: value for key, value in line.items() if key not in ("samples", "step")}
