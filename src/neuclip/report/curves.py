"""Which curves the page shows, and the sentence that explains each."""

from __future__ import annotations

from neuclip.formatting import format_samples
from neuclip.report.contents import RunContents, number
from neuclip.report.evaluations import DIRECTIONS, Evaluation
from neuclip.report.figures import NamedLine, curve, lines, placeholder, stacked
from neuclip.report.series import column

CALIBRATION_MEANING = "Batch mean of true over predicted normalizer: 1 when the prediction is right."
SHARE_KEYS = {"data": "data_share", "towers": "towers_share", "normalizer": "normalizer_share"}


def all_curves(run: RunContents, evaluations: list[Evaluation]) -> str:
    """The figures of the page, the most telling first."""
    if not run.records:
        return (
            '<p class="absence">There are no records yet: the curves appear with the first line of records.jsonl.</p>'
        )
    figures = [
        curve("Loss", column(run.records, "loss"), unit="loss of the batch"),
        curve(
            "In-batch accuracy",
            column(run.records, "accuracy"),
            unit="accuracy",
            percent=True,
            meaning="How often a sample's own partner scores highest within the batch.",
        ),
        recall_figure(evaluations),
        calibration_figure(run),
        curve("Temperature", column(run.records, "temperature"), unit="temperature τ", noisy=False),
        curve("Learning rate", column(run.records, "learning_rate"), unit="rate of the towers", noisy=False),
        shares_figure(run),
    ]
    if speed := column(run.records, "samples_per_second"):
        figures.append(curve("Speed", speed, unit="samples per second"))
    if norm := column(run.records, "gradient_norm"):
        figures.append(curve("Gradient norm", norm, unit="norm of the gradient", allow_log=True))
    return f'<div class="curves">{"".join(figures)}</div>'


def calibration_figure(run: RunContents) -> str:
    stretches = column(run.records, "calibration")
    if not stretches:
        if not run.predicts_normalizers:
            return placeholder("Calibration", f"{run.objective} predicts no normalizer, so there is none to calibrate.")
        return placeholder("Calibration", "The records hold no calibration so far.")
    return curve(
        "Calibration",
        stretches,
        unit="true / predicted",
        meaning=CALIBRATION_MEANING,
        reference=1.0,
        allow_log=True,
    )


def recall_figure(evaluations: list[Evaluation]) -> str:
    """Recall at 1, one colour per held-out set, one kind of line per direction."""
    title = "Recall at 1 on held-out data"
    datasets = list(dict.fromkeys(found.dataset for evaluation in evaluations for found in evaluation.retrieval))
    if not datasets:
        return placeholder(title, "No retrieval was evaluated.")
    if len({evaluation.samples for evaluation in evaluations if evaluation.retrieval}) == 1:
        when = format_samples(evaluations[-1].samples)
        reason = (
            f"There is one evaluation so far, at {when} samples: its figures are in the table below. "
            "A curve takes two or more; evaluation.every asks for them."
        )
        return placeholder(title, reason)
    shared = shared_folder(datasets)
    named = [
        NamedLine(
            f"{dataset.removeprefix(shared)}, {words}",
            recall_points(evaluations, dataset, direction),
            colour,
            dashed=direction != "image_to_text",
        )
        for colour, dataset in enumerate(datasets)
        for direction, words in DIRECTIONS.items()
    ]
    unit = f"recall at 1, {shared.rstrip('/')}" if shared else "recall at 1"
    return lines(title, [line for line in named if line.points], unit=unit)


def shared_folder(names: list[str]) -> str:
    """The folder that several names begin with: 'a/' for a/b and a/c; the legend need not repeat it."""
    if len(names) < 2:
        return ""
    folder = names[0][: names[0].rfind("/") + 1]
    return folder if all(name.startswith(folder) for name in names) else ""


def recall_points(evaluations: list[Evaluation], dataset: str, direction: str) -> list[tuple[float, float]]:
    return [
        (evaluation.samples, value)
        for evaluation in evaluations
        for found in evaluation.retrieval
        if found.dataset == dataset
        and evaluation.samples is not None
        and (value := found.recall.get((direction, 1))) is not None
    ]


def shares_figure(run: RunContents) -> str:
    """Where the time of a step goes; what is neither data, towers nor normalizer is 'other'."""
    rows = []
    for record in run.records:
        samples, towers = number(record.get("samples")), number(record.get("towers_share"))
        if samples is None or towers is None:
            continue
        # A share may be null where the method has no such phase; the rest of the step is still worth showing.
        shares = [min(1.0, max(0.0, number(record.get(key)) or 0.0)) for key in SHARE_KEYS.values()]
        whole = max(1.0, sum(shares))
        shares = [share / whole for share in shares]
        rows.append((samples, [*shares, 1.0 - sum(shares)]))
    if not rows:
        return placeholder("Where the time goes", "The records do not say how the time of a step is divided.")
    return stacked("Where the time goes", rows, [*SHARE_KEYS, "other"])
