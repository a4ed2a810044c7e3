"""What the commands do, as functions. Here, and only here, training meets evaluation and report."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from neuclip.data.faults import count_unindexed
from neuclip.data.held_out import HeldOutSets, asked_sets
from neuclip.distributed.collectives import is_main, single_process, world_size
from neuclip.distributed.error_sync import all_gather_str, on_main, processes, sync_errors
from neuclip.errors import UserError
from neuclip.evaluation.embedding import embed_pairs
from neuclip.evaluation.gallery import gallery
from neuclip.evaluation.normalizer_error import normalizer_error as measure_normalizer_error
from neuclip.evaluation.runner import Evaluation, evaluate_towers
from neuclip.evaluation.unusable import list_faults
from neuclip.models.export import export_model
from neuclip.models.towers import BuiltModel, Tokenize, Transform, build_model
from neuclip.objectives.objective import Objective
from neuclip.records import RunFolder, append_line, keep_lines, read_lines, write_json, write_text_safely
from neuclip.report.page import write_report
from neuclip.runs.checkpoint import checkpoints_in, latest_checkpoint, load_checkpoint
from neuclip.runs.environment import environment, peak_memory_bytes
from neuclip.runs.summary import headline_text, summary_text
from neuclip.settings.keys import changed_fields
from neuclip.settings.reading import read_settings
from neuclip.settings.secrets import without_queries
from neuclip.settings.sections import Settings
from neuclip.settings.writing import settings_as_yaml
from neuclip.training.batches import fault_log
from neuclip.training.loop import train as train_loop
from neuclip.training.precision import choose_device
from neuclip.training.run import Run, build_run, build_towers, objective_for, open_training_source

# What may differ between a run and its continuation: where and how it runs, never what it computes. Where the data lie
# may differ too: that they are the same, in the same order, is seen when they are open.
MAY_CHANGE_AT_RESUME = (
    "data.train",
    "run.device",
    "run.threads",
    "data.workers",
    "data.cache_size",
    "data.remote_timeout",
    "data.max_bad_share",
    "train.micro_batch_size",
    "evaluation.",
    "checkpoint.",
    "log.",
)
MATCHES_SHOWN = 5  # per query of the gallery


def train(settings: Settings | None = None, *, resume: Path | None = None) -> Path:
    """Train as `settings` say (default: recipe tiny), or continue the run `resume`. Answers the run's folder.

    Under torchrun every process calls it; they train one run together, and the main one writes.

    >>> folder = train(read_settings(None, ["--train.samples", "20k"]))        # doctest: +SKIP
    """
    settings = with_held_out_sets(settings or read_settings())
    asked = settings.evaluation
    with processes(choose_device(settings.run.device)):
        on_main(lambda: warn_of_training_data(settings))
        sets = on_main(lambda: HeldOutSets.open(asked.retrieval, asked.zero_shot)) or HeldOutSets({}, {})
        run = start_run(settings) if resume is None else continue_run(settings, RunFolder(resume))
        train_loop(run, lambda run: evaluate_on_the_way(run, sets))
        finish(run, sets)
    return run.folder.path


def warn_of_training_data(settings: Settings) -> None:
    if settings.data.train in settings.evaluation.retrieval:
        told = "evaluation.retrieval names the training data: its recall says nothing about images not trained on"
        print(told, file=sys.stderr)


def evaluate(
    target: str,
    *,
    retrieval: tuple[str, ...] | None = None,
    zero_shot: tuple[str, ...] | None = None,
    batch_size: int | None = None,
    max_bad_share: float | None = None,
) -> dict[str, float]:
    """Held-out figures of a run, a checkpoint or `local-dir:FOLDER`. What is not said comes from the run.

    Of every set one figure is `skipped`: the samples that could not be used. Too many of them are a RunFailed.
    """
    measured = measure(
        target, retrieval=retrieval, zero_shot=zero_shot, batch_size=batch_size, max_bad_share=max_bad_share
    )
    measured.raise_refused()
    return measured.figures


def measure(
    target: str,
    *,
    retrieval: tuple[str, ...] | None = None,
    zero_shot: tuple[str, ...] | None = None,
    batch_size: int | None = None,
    max_bad_share: float | None = None,
) -> Evaluation:
    """As `evaluate`, with the reasons, and with the figures of the other sets where one is refused."""
    built, settings = open_target(target)
    asked = settings.evaluation
    sets = HeldOutSets.open(
        asked.retrieval if retrieval is None else retrieval, asked.zero_shot if zero_shot is None else zero_shot
    )
    if not (sets.retrieval or sets.zero_shot):
        raise UserError(f"nothing to evaluate {target} on; give --retrieval DATA or --zero-shot FOLDER")
    return evaluate_towers(
        built,
        sets,
        batch_size=batch_size or asked.batch_size,
        workers=settings.data.workers,
        max_bad_share=settings.data.max_bad_share if max_bad_share is None else max_bad_share,
    )


def load(target: str) -> tuple[torch.nn.Module, Transform, Tokenize]:
    """The open_clip model of a run, a checkpoint or `local-dir:FOLDER`, with its transform and tokenizer.

    >>> model, transform, tokenizer = load("runs/first")        # doctest: +SKIP
    """
    built, _ = open_target(target)
    return built.towers.model.eval(), built.float_transform, built.tokenize


def normalizer_error(run: Path, *, anchors: int, seed: int, checkpoint: str = "") -> dict[str, Any]:
    """How far the run's normalizers, and a mini-batch's, are from the exact ones over its training data."""
    folder = RunFolder(run)
    settings = read_settings(folder.settings, [])
    path = find_checkpoint(folder, checkpoint)
    built = build_towers(settings, choose_device(settings.run.device))
    objective = objective_for(settings, built, len(open_training_source(settings)))
    state = load_checkpoint(path)
    built.towers.model.load_state_dict(state["model"])
    objective.load_state_dict(state["objective"])
    return _measure_error(settings, built, objective.eval(), anchors=anchors, seed=seed) | {"checkpoint": path.name}


def with_held_out_sets(settings: Settings) -> Settings:
    """With addresses in the place of `auto`, as a run stores them."""
    retrieval, zero_shot = asked_sets(settings)
    return replace(settings, evaluation=replace(settings.evaluation, retrieval=retrieval, zero_shot=zero_shot))


def start_run(settings: Settings) -> Run:
    """Collective."""
    chosen = on_main(lambda: new_folder(settings))
    folder = all_gather_str(str(chosen or ""), choose_device(settings.run.device))[0]
    run = build_run(settings, RunFolder(folder))
    started = environment(run.device, run.precision, run.fingerprint) | {"processes": world_size()}
    on_main(lambda: make_folder(run, started))
    run.save()  # a disk that cannot hold a checkpoint says so now, not after an hour
    _announce(run)
    return run


def make_folder(run: Run, started: dict[str, Any]) -> None:
    run.folder.path.mkdir(parents=True)
    write_text_safely(run.folder.settings, settings_as_yaml(run.settings))
    write_json(run.folder.environment, started)


def new_folder(settings: Settings) -> Path:
    """A run never overwrites another: a name that is taken is an error, a default name gets a number."""
    parent = Path(settings.run.folder)
    if settings.run.name:
        folder = parent / settings.run.name
        if folder.exists():
            raise UserError(
                f"{folder} exists; give another --run.name, or continue it: neuclip train --resume {folder}"
            )
        return folder
    model = settings.model.name.removeprefix("local-dir:").rstrip("/").rpartition("/")[2].removesuffix(".json")
    stem = f"{datetime.now(tz=UTC).date().isoformat()}-{settings.objective_name}-{model}"
    names = [stem] + [f"{stem}-{number}" for number in range(2, 10_000)]
    return next(parent / name for name in names if not (parent / name).exists())


def continue_run(settings: Settings, folder: RunFolder) -> Run:
    """Collective; on any number of processes."""
    with sync_errors():
        check_continuable(settings, folder)
    try:
        run = build_run(settings, folder)
    except UserError as error:
        raise UserError(f"{error}; if the data were moved, add --data.train and where they are now") from error
    with sync_errors():
        run.load(load_checkpoint(find_checkpoint(folder)))
    for path in (folder.records, folder.evaluation):
        on_main(partial(keep_lines, path, run.samples))
    on_main(
        lambda: write_text_safely(folder.settings, settings_as_yaml(settings))
    )  # where the data lie now, among others
    _announce(run)
    return run


def check_continuable(settings: Settings, folder: RunFolder) -> None:
    stored = read_settings(folder.settings, [])
    changed = [key for key in changed_fields(stored, settings) if not key.startswith(MAY_CHANGE_AT_RESUME)]
    if changed:
        raise UserError(
            f"{folder.path} cannot be continued with another {', '.join(changed)}; "
            "leave the flag out, or start a new run with it"
        )


def find_checkpoint(folder: RunFolder, name: str = "") -> Path:
    if name:
        path = folder.checkpoints / name
        if not path.is_file():
            known = ", ".join(other.name for other in checkpoints_in(folder.checkpoints)) or "none"
            raise UserError(f"{folder.path} has no checkpoint {name}; it has {known}")
        return path
    latest = latest_checkpoint(folder.checkpoints)
    if latest is None:
        raise UserError(f"{folder.path} has no checkpoint; start the run again under another name")
    return latest


def open_target(target: str) -> tuple[BuiltModel, Settings]:
    """A run's folder, a checkpoint inside one, or the folder of a saved open_clip model."""
    path = Path(target)
    is_checkpoint = path.suffix == ".pt" and path.is_file()
    folder = RunFolder(path.parent.parent if is_checkpoint else path)
    if not folder.settings.is_file():
        built = build_model(target)
        if not target.startswith("local-dir:"):
            raise UserError(f"{target} names a model without weights; give a run, a checkpoint or local-dir:FOLDER")
        return built, with_held_out_sets(Settings())
    settings = read_settings(folder.settings, [])
    built = build_towers(settings, choose_device(settings.run.device))
    state = load_checkpoint(path if is_checkpoint else find_checkpoint(folder))
    built.towers.model.load_state_dict(state["model"])
    return built, settings


def record_evaluation(run: Run, sets: HeldOutSets, errors: dict[str, float] | None = None) -> Evaluation:
    """Measure, and write it down, in one line with the normalizer `errors` if they were measured too."""
    settings = run.settings
    measured = evaluate_towers(
        run.built,
        sets,
        batch_size=settings.evaluation.batch_size,
        workers=settings.data.workers,
        max_bad_share=settings.data.max_bad_share,
    )
    figures = measured.figures | (errors or {})
    if figures:
        append_line(run.folder.evaluation, {"samples": run.samples, "step": run.step, **figures})
    list_faults(run.folder.skipped, measured.faults)
    return measured


def evaluate_on_the_way(run: Run, sets: HeldOutSets) -> None:
    """Collective: the main process measures while the others wait."""
    objective = objective_alone(run) if _error_due(run) else None
    on_main(lambda: _evaluate_on_the_way(run, sets, objective))


def _evaluate_on_the_way(run: Run, sets: HeldOutSets, objective: Objective | None) -> None:
    errors = _errors(run, objective) if objective else {}
    measured = record_evaluation(run, sets, errors)
    if measured.figures:
        print(f"at {run.samples:,} samples: {headline_text(measured.figures, measured.refused)}", file=sys.stderr)


def objective_alone(run: Run) -> Objective | None:
    """Collective. In the main process a copy of the objective that holds the whole state and needs no other process."""
    state = run.objective.state_dict()
    if not is_main():
        return None
    with single_process():
        copy = objective_for(run.settings, run.built, len(run.source))
        copy.load_state_dict(state)
        return copy.eval()


def finish(run: Run, sets: HeldOutSets) -> None:
    """Collective: the main process writes the results while the others wait."""
    seconds = run.seconds
    objective = objective_alone(run) if run.settings.evaluation.error_anchors else None
    on_main(lambda: write_results(run, sets, objective, seconds))


def write_results(run: Run, sets: HeldOutSets, objective: Objective | None, seconds: float) -> None:
    """Held-out figures, normalizer error, gallery, model folder, summary and report of a finished run."""
    measured = record_evaluation(run, sets)
    summary = summarise(run, measured, seconds)
    asked = run.settings.evaluation
    if objective:
        summary["normalizer_error"] = _measure_error(
            run.settings, run.built, objective, anchors=asked.error_anchors, seed=run.settings.run.seed
        )
    if measured.embedded and asked.gallery:
        write_json(run.folder.gallery, _gallery(run, sets, measured))
    export_model(run.built, run.folder.model)
    write_json(run.folder.summary, summary)
    page = write_report(run.folder)
    print(summary_text(summary, batch_size=run.settings.train.batch_size))
    print(f"Report: {page}")


def summarise(run: Run, measured: Evaluation, seconds: float) -> dict[str, Any]:
    records = read_lines(run.folder.records)
    last_quarter = records[-max(1, len(records) // 4) :]
    calibration = [record["calibration"] for record in last_quarter if record.get("calibration") is not None]
    skipped, lost = fault_log(run).counts, count_unindexed(run.source)
    return {
        "samples_seen": run.samples,
        "loss": records[-1]["loss"] if records else None,
        "temperature": run.temperature,
        # Of the last quarter; the median, because a rare equal caption in a batch sends a single record far up.
        "calibration": median(calibration) if calibration else None,
        "seconds": seconds,  # of training, with the evaluations in between and without the last one
        "samples_per_second": run.samples / seconds,
        "peak_memory_bytes": peak_memory_bytes(run.device),
        "truncated_captions": records[-1].get("truncated_captions") if records else None,
        "skipped": dict(skipped.most_common()),
        # Of the different samples that were read; what never became a sample was not among them.
        "skipped_share": (skipped.total() - lost) / min(run.samples, len(run.source)),
        "lost_share": lost / (len(run.source) + lost),
        "skipped_held_out": measured.skipped,
        "not_measured": measured.refused,
        "evaluation": measured.figures,
    }


def _error_due(run: Run) -> bool:
    """Whether `evaluation.error_every` has been passed since the evaluation before."""
    asked = run.settings.evaluation
    latest = run.samples // asked.every * asked.every  # evaluations come at the first step past a multiple of `every`
    return bool(asked.error_every) and latest // asked.error_every > (latest - asked.every) // asked.error_every


def _errors(run: Run, objective: Objective) -> dict[str, float]:
    """`normalizer_error.method` and `.minibatch`; a method without an estimate has only the second."""
    anchors, seed = run.settings.evaluation.error_anchors, run.settings.run.seed
    found = _measure_error(run.settings, run.built, objective, anchors=anchors, seed=seed)
    return {f"normalizer_error.{name}": errors["mean"] for name, errors in found["estimators"].items()}


def _measure_error(
    settings: Settings, built: BuiltModel, objective: Objective, *, anchors: int, seed: int
) -> dict[str, Any]:
    embedded = embed_pairs(
        built.towers,
        open_training_source(settings),
        transform=built.transform,
        tokenize=built.tokenize,
        batch_size=settings.evaluation.batch_size,
        workers=settings.data.workers,
        what="embedding the training data",
    )
    return measure_normalizer_error(
        embedded.image_features,
        embedded.text_features[embedded.caption_of],
        logit_scale=built.towers.logit_scale.detach(),
        eps=settings.objective.normalizer_eps,
        objective=objective,
        batch_size=settings.train.batch_size,
        anchors=anchors,
        seed=seed,
        caption_of=embedded.caption_of,
        sample_ids=embedded.ids,
    )


def _gallery(run: Run, sets: HeldOutSets, measured: Evaluation) -> dict[str, Any]:
    """Queries of the first retrieval set that was measured, for the report."""
    name, embedded = next(iter(measured.embedded.items()))
    shown = gallery(
        embedded.image_features,
        embedded.text_features,
        embedded.captions,
        embedded.caption_of,
        sets.retrieval[name],
        ids=embedded.ids,
        count=run.settings.evaluation.gallery,
        top=MATCHES_SHOWN,
        seed=run.settings.run.seed,
    )
    return shown | {"dataset": name}


def _announce(run: Run) -> None:
    if not is_main():
        return
    settings, batch = run.settings, run.settings.train.batch_size
    where = f"{run.device}" if world_size() == 1 else f"{world_size()} processes on {run.device}"
    parameters = sum(p.numel() for p in run.built.towers.parameters())
    print(
        f"{run.folder.path}\n"
        f"  {settings.objective_name} on {len(run.source):,} pairs of {without_queries(settings.data.train)}\n"
        f"  model {settings.model.name} ({parameters / 1e6:.1f} M parameters, {where})\n"
        f"  {run.total_steps - run.step:,} steps of {batch}, {f'from {run.samples:,} ' if run.step else ''}to "
        f"{run.total_steps * batch:,} samples "
        f"({run.total_steps * batch / run.epoch_samples:.1f} epochs)",
        file=sys.stderr,
    )
