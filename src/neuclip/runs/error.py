"""Measure the error of normalizers: of several runs, with the same anchors, eps and numbers of samples seen; and of a
run during its training."""

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
    """A run to measure."""

    folder: RunFolder
    settings: Settings
    source: Source
    data: dict[str, int | str]  # fingerprint


def normalizer_errors(
    runs: Sequence[Path], *, anchors: int, seed: int, eps: float | None = None, checkpoints: int = 5
) -> dict[str, Any]:
    """The error of each run's normalizers, and of those from a batch of its size, relative to the exact ones over the
    training data: for all runs with the same anchors, the same eps, and at equal numbers of samples seen.

    `eps`: None means the largest of the runs; FastCLIP's averages contain its eps and cannot be compared at a smaller
    one. `checkpoints`: the number of checkpoints, evenly spaced among those that all runs have.

    >>> normalizer_errors([Path("runs/a"), Path("runs/b")], anchors=10_000, seed=0)["runs"][0]["mean"]  # doctest: +SKIP
    """
    opened = [_open(path) for path in runs]
    refuse_other_data(opened)
    eps = max(run.settings.objective.eps for run in opened) if eps is None else eps
    rows = choose(match_checkpoints(opened), checkpoints)
    work = [(number, path) for row in rows for number, path in enumerate(row)]
    errors_of_runs: list[list[dict[str, Any]]] = [[] for _ in opened]
    for count, (number, path) in enumerate(track(work, "normalizer errors", len(work), "checkpoints"), start=1):
        run = opened[number]
        what = f"{run.folder.path.name} at {samples_at(path):,} samples ({count} of {len(work)}): embedding"
        errors_of_runs[number].append(error_at(run, path, eps=eps, anchors=anchors, seed=seed, what=what))
    return {
        "eps": eps,
        "anchors": errors_of_runs[0][0]["anchors"],
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
            for run, errors in zip(opened, errors_of_runs, strict=True)
        ],
    }


def _open(path: Path) -> MeasuredRun:
    folder = RunFolder(path)
    settings = stored_settings(folder)
    with local_only(path):
        source = open_training_source(settings)
    return MeasuredRun(folder, settings, source, fingerprint(source)[0])


def refuse_other_data(runs: Sequence[MeasuredRun]) -> None:
    """Refuse runs on different data: normalizers over different data sets cannot be compared."""
    first = runs[0]
    for run in runs:
        if run.data != first.data:
            raise UserError(
                f"{first.folder.path} and {run.folder.path} were trained on different data ({first.data['count']:,} "
                f"and {run.data['count']:,} samples, or other captions); compare runs on the same data"
            )


def match_checkpoints(runs: Sequence[MeasuredRun]) -> list[tuple[Path, ...]]:
    """Rows with one checkpoint of each run, at equal numbers of samples seen (less than one batch apart). Step 0 is
    left out, because no method has trained yet."""
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
    """Choose `count` rows, evenly spaced by samples seen. The last row is always among them."""
    end = samples_at(rows[-1][0])
    targets = [end * part / count for part in range(1, count + 1)]
    nearest = {min(rows, key=lambda row: abs(samples_at(row[0]) - samples)) for samples in targets}
    return [row for row in rows if row in nearest]


def mean_over_checkpoints(errors: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The mean error of each estimator that has an error at every checkpoint."""
    names = [name for name in errors[0]["estimators"] if all(name in error["estimators"] for error in errors)]
    return {name: fmean(error["estimators"][name]["mean"] for error in errors) for name in names}


def error_at(run: MeasuredRun, checkpoint: Path, *, eps: float, anchors: int, seed: int, what: str) -> dict[str, Any]:
    """The error at one checkpoint of a run."""
    built, settings, state = load_run(run.folder, checkpoint)
    if state["data"] != run.data:
        raise RunFailed(
            f"{run.folder.path} was trained on {state['data']['count']:,} samples, which are not those in "
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
    """The error over the training data. Collective; the same on all ranks. Only the main rank needs the objective."""
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
    """The error of a run during its training, with its own eps. Collective; the same on all ranks."""
    settings = run.settings
    state = run.objective.state_dict()  # gathered from all ranks
    objective = None
    if is_main():
        with single_process():
            objective = build_objective(settings, run.built, len(run.source))
            objective.load_state_dict(state)
            objective.eval()
    return error_on_training_data(
        settings,
        Embedder(run.built, settings.evaluation.batch_size, settings.data.workers, stored=run.stored_sides),
        objective,
        run.source,
        eps=settings.objective.eps,
        anchors=settings.evaluation.error_anchors,
        seed=settings.run.seed,
        what="embedding the training data",
    )


def error_figures(measured: dict[str, Any]) -> dict[str, float]:
    """The figures `normalizer_error.method` and `.minibatch`; without an estimate of the method only the second."""
    return {f"normalizer_error.{name}": errors["mean"] for name, errors in measured["estimators"].items()}
