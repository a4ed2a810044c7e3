"""The error of normalizers: of several runs at the same anchors, with one eps, at equal numbers of samples seen; and of
a run while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from neuclip.data.open import local_only
from neuclip.data.source import Source, fingerprint
from neuclip.distributed.collectives import is_main, single_process
from neuclip.errors import RunFailed, UserError
from neuclip.evaluation.embedding import Embedder
from neuclip.evaluation.normalizer_error import normalizer_error
from neuclip.objectives.objective import Objective
from neuclip.progress import track
from neuclip.records import RunFolder
from neuclip.runs.build import build_objective, open_training_source
from neuclip.runs.folder import checkpoints_in, samples_at, stored_settings
from neuclip.runs.load import load_run
from neuclip.secrets import without_queries
from neuclip.settings.sections import Settings
from neuclip.training.run import Run


@dataclass(frozen=True)
class MeasuredRun:
    """A run whose normalizers are measured."""

    folder: RunFolder
    settings: Settings
    source: Source
    data: dict[str, int | str]  # fingerprint


def normalizer_errors(
    runs: Sequence[Path], *, anchors: int, seed: int, eps: float | None = None, checkpoints: int = 5
) -> dict[str, Any]:
    """How far each run's normalizers, and those of a batch of its size, are from the exact ones over the training data:
    for all runs the same anchors, the same eps, and checkpoints at equal numbers of samples seen.

    `eps`: None is the largest of the runs' own; FastCLIP's averages include its eps and cannot be compared at a smaller
    one. `checkpoints`: how many, evenly spaced, of those that all runs have.

    >>> normalizer_errors([Path("runs/a"), Path("runs/b")], anchors=10_000, seed=0)["runs"][0]["mean"]  # doctest: +SKIP
    """
    opened = [_open(path) for path in runs]
    refuse_other_data(opened)
    eps = max(run.settings.objective.eps for run in opened) if eps is None else eps
    rows = choose(match_checkpoints(opened), checkpoints)
    work = [(number, path) for row in rows for number, path in enumerate(row)]
    found: list[list[dict[str, Any]]] = [[] for _ in opened]
    for count, (number, path) in enumerate(track(work, "normalizer errors", len(work), "checkpoints"), start=1):
        run = opened[number]
        what = f"{run.folder.path.name} at {samples_at(path):,} samples ({count} of {len(work)}): embedding"
        found[number].append(error_at(run, path, eps=eps, anchors=anchors, seed=seed, what=what))
    return {
        "eps": eps,
        "anchors": found[0][0]["anchors"],
        "seed": seed,
        "runs": [
            {
                "run": str(run.folder.path),
                "objective": run.settings.objective_name,
                "batch_size": run.settings.train.batch_size,
                "own_eps": run.settings.objective.eps,
                "mean": mean_over_checkpoints(errors),
                "checkpoints": errors,
            }
            for run, errors in zip(opened, found, strict=True)
        ],
    }


def _open(path: Path) -> MeasuredRun:
    folder = RunFolder(path)
    settings = stored_settings(folder)
    with local_only(path):
        source = open_training_source(settings)
    return MeasuredRun(folder, settings, source, fingerprint(source)[0])


def refuse_other_data(runs: Sequence[MeasuredRun]) -> None:
    """Normalizers are over a data set: on another one neither the anchors nor the figures are the same."""
    first = runs[0]
    for run in runs:
        if run.data != first.data:
            raise UserError(
                f"{first.folder.path} and {run.folder.path} were trained on different data ({first.data['count']:,} "
                f"and {run.data['count']:,} samples, or other captions); compare runs on the same data"
            )


def match_checkpoints(runs: Sequence[MeasuredRun]) -> list[tuple[Path, ...]]:
    """One checkpoint of each run, at as many samples as their batches allow: less than one batch apart. Step 0 is left
    out: no method has trained yet."""
    apart = max(run.settings.train.batch_size for run in runs)
    saved = [[path for path in checkpoints_in(run.folder) if samples_at(path)] for run in runs]
    rows: list[tuple[Path, ...]] = []
    for path in saved[0]:
        nearest = [
            min(paths, key=lambda other: abs(samples_at(other) - samples_at(path)), default=None) for paths in saved
        ]
        row = tuple(other for other in nearest if other and abs(samples_at(other) - samples_at(path)) < apart)
        if len(row) == len(runs) and not any(other in earlier for earlier in rows for other in row):
            rows.append(row)
    if not rows:
        kept = "; ".join(
            f"{run.folder.path} has {', '.join(f'{samples_at(path):,}' for path in paths) or 'none'}"
            for run, paths in zip(runs, saved, strict=True)
        )
        raise UserError(f"no checkpoints at equal numbers of samples: {kept}; train with --checkpoint.milestones 5")
    return rows


def choose(rows: list[tuple[Path, ...]], count: int) -> list[tuple[Path, ...]]:
    """So many, the nearest to equal parts of the samples seen; the last is always among them."""
    end = samples_at(rows[-1][0])
    wanted = [end * part / count for part in range(1, count + 1)]
    nearest = {min(rows, key=lambda row: abs(samples_at(row[0]) - samples)) for samples in wanted}
    return [row for row in rows if row in nearest]


def mean_over_checkpoints(errors: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each estimator that answered at all of them."""
    names = [name for name in errors[0]["estimators"] if all(name in found["estimators"] for found in errors)]
    return {name: fmean(found["estimators"][name]["mean"] for found in errors) for name in names}


def error_at(run: MeasuredRun, checkpoint: Path, *, eps: float, anchors: int, seed: int, what: str) -> dict[str, Any]:
    """The error at one checkpoint."""
    built, settings, state = load_run(run.folder, checkpoint)
    if state["data"] != run.data:
        raise RunFailed(
            f"{run.folder.path} was trained on {state['data']['count']:,} samples that are not those of "
            f"{without_queries(settings.data.train)} now ({len(run.source):,}); bring back the old data"
        )
    objective = build_objective(settings, built, len(run.source))
    objective.load_state_dict(state["objective"])
    embedder = Embedder(built, settings.evaluation.batch_size, settings.data.workers)
    measured = error_on_training_data(
        settings, embedder, objective.eval(), run.source, eps=eps, anchors=anchors, seed=seed, what=what
    )
    return {"checkpoint": checkpoint.name, "samples": state["samples"], "step": state["step"], **measured}


def error_on_training_data(
    settings: Settings,
    embedder: Embedder,
    objective: Objective | None,
    source: Source,
    *,
    eps: float,
    anchors: int,
    seed: int,
    what: str,
) -> dict[str, Any]:
    """Collective; the same on all ranks. Only the main rank needs the objective."""
    pairs = embedder.embed_pairs(source, what, first_caption_only=True)
    return normalizer_error(
        pairs.image_features,
        pairs.text_features[pairs.first_text],
        logit_scale=embedder.built.towers.logit_scale.detach(),
        eps=eps,
        objective=objective,
        batch_size=settings.train.batch_size,
        anchors=anchors,
        seed=seed,
        caption_of=pairs.first_text,
        sample_ids=pairs.ids,
        dataset_size=len(source),
    )


def measure_error(run: Run) -> dict[str, Any]:
    """Collective; the same on all ranks. The error of a run that is being trained, with its own eps."""
    settings = run.settings
    state = run.objective.state_dict()  # of all ranks
    whole = None
    if is_main():
        with single_process():
            whole = build_objective(settings, run.built, len(run.source))
            whole.load_state_dict(state)
            whole.eval()
    return error_on_training_data(
        settings,
        Embedder(run.built, settings.evaluation.batch_size, settings.data.workers, stored=run.stored_sides),
        whole,
        run.source,
        eps=settings.objective.eps,
        anchors=settings.evaluation.error_anchors,
        seed=settings.run.seed,
        what="embedding the training data",
    )


def error_figures(measured: dict[str, Any]) -> dict[str, float]:
    """`normalizer_error.method` and `.minibatch`; a method without an estimate has only the second."""
    return {f"normalizer_error.{name}": errors["mean"] for name, errors in measured["estimators"].items()}
