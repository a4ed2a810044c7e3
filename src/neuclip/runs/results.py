"""The results of a run: evaluations during training; at the end model, figures, gallery, summary and report.

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
    """Open the held-out sets before the run starts, to fail early if one cannot be opened. Collective."""
    sets = main_rank_first(lambda: HeldOutSets.open(settings))
    sources = (*sets.retrieval.values(), *(task.source for task in sets.zero_shot.values()))
    sizes = all_gather_object([len(source) for source in sources])  # each rank embeds a part of every set
    if any(other != sizes[0] for other in sizes):
        seen = "; ".join(f"rank {number} sets of {lengths} samples" for number, lengths in enumerate(sizes))
        raise_on_main(UserError(f"ranks see different held-out data: {seen}; give all ranks the same files"))
    return sets


def say_before_training(run: Run, sets: HeldOutSets) -> None:
    """Print the held-out sets and the advice for a run, while there is time to stop it. The captions show whether a set
    was read wrongly."""
    if not is_main():
        return
    for name, size in describe_held_out(sets).items():
        say(f"  held out {name}: {size}")
    for advice in run_advice(run, sets):
        say("{}: {}; {}".format(*advice))


def describe_held_out(sets: HeldOutSets) -> dict[str, str]:
    """The size of each held-out set as text, by name."""
    sizes = {name: str(fingerprint(source)[1]) for name, source in sets.retrieval.items()}
    for name, task in sets.zero_shot.items():
        sizes[name] = f"{plural(len(task.source), 'image')} of {plural(len(task.classnames), 'class', 'classes')}"
    return sizes


def evaluate_on_the_way(run: Run, sets: HeldOutSets) -> None:
    """Evaluate during training: write a line of evaluation.jsonl and print one. Collective."""
    evaluation, _ = measure(run, sets)
    if evaluation.figures and is_main():
        say(f"at {run.samples:,} samples: {headline_text(evaluation.figures, evaluation.refused)}")


def evaluate_missed(run: Run, sets: HeldOutSets) -> None:
    """Evaluate a resumed run that was killed during an evaluation: it has that step's checkpoint, but not its figures.
    Collective."""
    every, before = run.settings.evaluation.every, run.samples - run.plan.batch_size
    due = every and 0 < run.step < run.plan.steps and run.samples // every > before // every
    lines = from_main_rank(lambda: read_lines(run.folder.evaluation)) if due else []
    if due and not any(line["samples"] == run.samples for line in lines):
        evaluate_on_the_way(run, sets)


def measure(run: Run, sets: HeldOutSets) -> tuple[Evaluation, dict[str, Any]]:
    """Measure held-out figures and, after the first step and if `error_anchors` is not 0, the normalizer error. Writes
    one line of evaluation.jsonl, in place of an earlier one for the same step. Collective."""
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
    """Copy the main rank's running statistics of BatchNorm to every rank, because its model is the exported one. DDP
    would do so before the next step. Collective."""
    norms = [module for module in run.built.towers.modules() if isinstance(module, _BatchNorm)]
    for buffer in (buffer for norm in norms for buffer in norm.buffers()) if world_size() > 1 else ():
        buffer.copy_(gather_values(buffer[None])[0])


def finish(run: Run, sets: HeldOutSets) -> None:
    """Export the model of a finished run, measure it and write the results. Collective."""
    seconds = run.seconds
    on_main_rank(lambda: export_model(run.built, run.folder.model))  # first, in case something below fails
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
    tokens = 2 * run.built.config["text_cfg"].get("context_length", 77)  # a guess: caption lengths are not counted
    longer = f"give --model.context_length {tokens}"
    print(summary_text(summary, batch_size=run.plan.batch_size, longer_context=longer))
    print(f"Report: {page}")
    if folder := run.source.folder:
        print(f"Search: neuclip search {run.folder.path} {shlex.quote(str(folder))} 'your words'")


def summarise(run: Run, evaluation: Evaluation, seconds: float) -> dict[str, Any]:
    """The content of summary.json."""
    records, first = read_lines(run.folder.records), next(iter(read_lines(run.folder.evaluation)), {})
    truncated = [record["truncated_captions"] for record in records if record.get("truncated_captions") is not None]
    skipped, lost = run.faults.counts, count_unindexed(run.source)
    return {
        "samples_seen": run.samples,
        "loss": records[-1].get("loss") if records else None,
        "temperature": run.temperature,
        "calibration": late_median(records, "calibration"),
        "stored_features": run.stored,
        "seconds": seconds,  # of training, including all evaluations but the last
        "samples_per_second": run.samples / seconds,
        "peak_memory_bytes": peak_memory_bytes(run.device),
        "truncated_captions": fmean(truncated) if truncated else None,
        "skipped": dict(skipped.most_common()),
        # The share of the different samples that were read, without those that could not be indexed.
        "skipped_share": (skipped.total() - lost) / min(run.samples, len(run.source)),
        "lost_share": lost / (len(run.source) + lost),
        "skipped_held_out": evaluation.skipped,
        "not_measured": evaluation.refused,
        "evaluation": evaluation.figures,
        # The figures that evaluation.at_start measured before the first step.
        "evaluation_at_start": {} if first.get("samples", 1) else without_place(first),
    }


def without_place(line: dict[str, Any]) -> dict[str, Any]:
    """The figures of a line of evaluation.jsonl."""
    return {key: value for key, value in line.items() if key not in ("samples", "step")}
