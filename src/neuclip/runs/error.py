"""The error of normalizers: of several runs at the same anchors, with one eps, at equal numbers of samples seen; and of
a run while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from neuclip.data.source import Source, fingerprint
from neuclip.distributed.collectives import is_main, single_process
from neuclip.errors import RunFailed, UserError
from neuclip.evaluation import normalizer_error as error
from neuclip.evaluation.embedding import Embedder
from neuclip.models.towers import BuiltModel
from neuclip.objectives.objective import Objective
from neuclip.progress import track
from neuclip.records import RunFolder
from neuclip.runs.build import build_objective, open_training_source
from neuclip.runs.folder import checkpoints_in, samples_at
from neuclip.runs.target import load_run
from neuclip.secrets import without_queries
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings
from neuclip.training.run import Run


@dataclass(frozen=True)
class Trained:
    """A run whose normalizers are measured."""

    folder: RunFolder
    settings: Settings
    source: Source
    data: dict[str, int | str]  # fingerprint

    @classmethod
    def open(cls, path: Path) -> Trained:
        folder = RunFolder(path)
        settings = read_settings(folder.settings, [])
        source = open_training_source(settings)
        return cls(folder, settings, source, fingerprint(source)[0])


def normalizer_errors(
    runs: Sequence[Path], *, anchors: int, seed: int, eps: float | None = None, checkpoints: str = "5"
) -> dict[str, Any]:
    """How far each run's normalizers, and those of a batch of its size, are from the exact ones over the training data:
    for all runs the same anchors, the same eps, and checkpoints at equal numbers of samples seen.

    `eps`: None is the largest of the runs' own; a method that stores eps with its normalizers cannot tell what a
    smaller one would have let through. `checkpoints`: "all" that every run has, the "last", or a number of them, evenly
    spaced.

    >>> normalizer_errors([Path("runs/a"), Path("runs/b")], anchors=10_000, seed=0)["runs"][0]["mean"]  # doctest: +SKIP
    """
    trained = [Trained.open(path) for path in runs]
    refuse_other_data(trained)
    own_eps = [run.settings.objective.eps for run in trained]
    eps = max(own_eps) if eps is None else eps
    rows = choose(match_checkpoints(trained), checkpoints)
    work = [(run, row[number]) for row in rows for number, run in enumerate(trained)]
    found: dict[Path, dict[str, Any]] = {}
    for count, (run, path) in enumerate(track(work, "normalizer errors", len(work), "checkpoints"), start=1):
        what = f"{run.folder.path.name} at {samples_at(path):,} samples ({count} of {len(work)}): embedding"
        found[path] = error_at(run, path, eps=eps, anchors=anchors, seed=seed, what=what)
    columns = [[found[row[number]] for row in rows] for number in range(len(trained))]
    return {
        "eps": eps,
        "anchors": columns[0][0]["anchors"],
        "seed": seed,
        "runs": [
            {
                "run": str(run.folder.path),
                "objective": run.settings.objective_name,
                "batch_size": run.settings.train.batch_size,
                "own_eps": own,
                "mean": mean_over_checkpoints(errors),
                "checkpoints": errors,
            }
            for run, own, errors in zip(trained, own_eps, columns, strict=True)
        ],
    }


def refuse_other_data(runs: Sequence[Trained]) -> None:
    """Normalizers are over a data set: on another one neither the anchors nor the figures are the same."""
    first = runs[0]
    for run in runs:
        if run.data != first.data:
            raise UserError(
                f"{first.folder.path} and {run.folder.path} were trained on different data ({first.data['count']:,} "
                f"and {run.data['count']:,} samples, or other captions); compare runs on the same data"
            )


def match_checkpoints(runs: Sequence[Trained]) -> list[tuple[Path, ...]]:
    """One checkpoint of each run, at as many samples as their batches allow: less than one batch apart."""
    apart = max(run.settings.train.batch_size for run in runs)
    # The weights before training are nobody's method.
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


def choose(rows: list[tuple[Path, ...]], checkpoints: str) -> list[tuple[Path, ...]]:
    """All, the last, or so many, the nearest to equal parts of the samples seen."""
    if checkpoints in ("all", "last"):
        return rows if checkpoints == "all" else rows[-1:]
    count, end = int(checkpoints), samples_at(rows[-1][0])
    wanted = [end * part / count for part in range(1, count + 1)]
    nearest = {min(rows, key=lambda row: abs(samples_at(row[0]) - samples)) for samples in wanted}
    return [row for row in rows if row in nearest]


def mean_over_checkpoints(errors: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each estimator that answered at all of them."""
    names = [name for name in errors[0]["estimators"] if all(name in found["estimators"] for found in errors)]
    return {name: fmean(found["estimators"][name]["mean"] for found in errors) for name in names}


def error_at(run: Trained, checkpoint: Path, *, eps: float, anchors: int, seed: int, what: str) -> dict[str, Any]:
    """The error at one checkpoint, with what it must be read with."""
    built, settings, state = load_run(run.folder, checkpoint)
    if state["data"] != run.data:
        raise RunFailed(
            f"{run.folder.path} was trained on {state['data']['count']:,} samples that are not those of "
            f"{without_queries(settings.data.train)} now ({len(run.source):,}); bring back the old data"
        )
    objective = build_objective(settings, built, len(run.source))
    objective.load_state_dict(state["objective"])
    errors = error_on_training_data(
        settings,
        built,
        objective.eval(),
        run.source,
        held_ids=objective.held_samples(),
        eps=eps,
        anchors=anchors,
        seed=seed,
        what=what,
    )
    found = {"checkpoint": checkpoint.name, "samples": state["samples"], "step": state["step"]}
    return found | since_restart(objective) | errors


def error_on_training_data(
    settings: Settings,
    built: BuiltModel,
    objective: Objective | None,
    source: Source,
    *,
    held_ids: Tensor,
    eps: float,
    anchors: int,
    seed: int,
    what: str,
) -> dict[str, Any]:
    """Collective; the same on all ranks. Only the main rank needs the objective."""
    embedder = Embedder(built, settings.evaluation.batch_size, settings.data.workers)
    pairs = embedder.embed_pairs(source, what, first_caption_only=True)
    return error.normalizer_error(
        pairs.image_features,
        pairs.text_features[pairs.first_text],
        logit_scale=built.towers.logit_scale.detach(),
        eps=eps,
        objective=objective,
        batch_size=settings.train.batch_size,
        anchors=anchors,
        seed=seed,
        caption_of=pairs.first_text,
        sample_ids=pairs.ids,
        dataset_size=len(source),
        held_ids=held_ids,
    )


def since_restart(objective: Objective) -> dict[str, int]:
    """Steps since features were last stored; 0: those of the last step were."""
    steps = objective.steps_since_restart
    return {} if steps is None else {"steps_since_restart": steps}


def measure_error(run: Run) -> dict[str, Any]:
    """Collective; the same on all ranks. The error of a run that is being trained, with its own eps."""
    settings = run.settings
    errors = error_on_training_data(
        settings,
        run.built,
        whole_objective(run),
        run.source,
        held_ids=run.objective.held_samples(),
        eps=settings.objective.eps,
        anchors=settings.evaluation.error_anchors,
        seed=settings.run.seed,
        what="embedding the training data",
    )
    return since_restart(run.objective) | errors


def whole_objective(run: Run) -> Objective | None:
    """Collective. On the main rank a copy of the objective that holds the state of all ranks; None on the others."""
    state = run.objective.state_dict()
    if not is_main():
        return None
    with single_process():
        copy = build_objective(run.settings, run.built, len(run.source))
        copy.load_state_dict(state)
        return copy.eval()


def estimator_errors(measured: dict[str, Any]) -> dict[str, float]:
    """`normalizer_error.method` and `.minibatch`; a method without an estimate has only the second."""
    return {f"normalizer_error.{name}": errors["mean"] for name, errors in measured["estimators"].items()}
