"""Which curves the page shows, and the sentence that explains each."""

from __future__ import annotations

from neuclip.formatting import format_samples
from neuclip.report.contents import RunContents, number
from neuclip.report.evaluations import DIRECTIONS, Evaluation
from neuclip.report.figures import Figure, NamedLine, curve, lines, stacked
from neuclip.report.plotting import Point, column

CALIBRATION_MEANING = "Batch mean of true over predicted normalizer: 1 when the prediction is right."
SHARE_KEYS = {"data": "data_share", "towers": "towers_share", "normalizer": "normalizer_share"}


def all_curves(run: RunContents, evaluations: list[Evaluation]) -> list[Figure]:
    """The figures of the page, the most important first; none before the first record."""
    if not run.records:
        return []
    figures = [
        curve("Loss", column(run.records, "loss"), unit="loss of the batch"),
        curve(
            "In-batch accuracy",
            column(run.records, "accuracy"),
            unit="accuracy",
            in_percent=True,
            explanation="Share of the batch whose own pair scores highest.",
        ),
        recall_figure(evaluations),
        calibration_figure(run),
        curve("Temperature", column(run.records, "temperature"), unit="temperature τ", noisy=False),
        curve("Learning rate", column(run.records, "learning_rate"), unit="rate of the towers", noisy=False),
        time_figure(run),
    ]
    if speed := column(run.records, "samples_per_second"):
        figures.append(curve("Speed", speed, unit="samples per second"))
    if norm := column(run.records, "gradient_norm"):
        figures.append(curve("Gradient norm", norm, unit="norm of the gradient", allow_log=True))
    return figures


def calibration_figure(run: RunContents) -> Figure:
    segments = column(run.records, "calibration")
    if not segments:
        reason = "The records hold no calibration so far."
        if not run.predicts_normalizers:
            reason = f"{run.objective} predicts no normalizer: there is nothing to calibrate."
        return Figure(title="Calibration", absence=reason)
    return curve(
        "Calibration",
        segments,
        unit="true / predicted",
        explanation=CALIBRATION_MEANING,
        reference=1.0,
        allow_log=True,
    )


def recall_figure(evaluations: list[Evaluation]) -> Figure:
    """Recall at 1, one colour per held-out set, one kind of line per direction."""
    title = "Recall at 1 on held-out data"
    names = list(dict.fromkeys(held_out.name for evaluation in evaluations for held_out in evaluation.retrieval))
    if not names:
        return Figure(title=title, absence="No retrieval was evaluated.")
    if len({evaluation.samples for evaluation in evaluations if evaluation.retrieval}) == 1:
        reason = (
            f"There is one evaluation so far, at {format_samples(evaluations[-1].samples)} samples: see the table below. "
            "A curve needs two or more; set evaluation.every."
        )
        return Figure(title=title, absence=reason)
    folder = shared_folder(names)
    named = [
        NamedLine(
            f"{name.removeprefix(folder)}, {words}",
            recall_points(evaluations, name, direction),
            colour,
            dashed=direction != "image_to_text",
        )
        for colour, name in enumerate(names)
        for direction, words in DIRECTIONS.items()
    ]
    named = [line for line in named if line.points]
    if not named:
        return Figure(title=title, absence="No recall at 1 was measured.")
    return lines(title, named, unit=f"recall at 1, {folder.rstrip('/')}" if folder else "recall at 1")


def shared_folder(names: list[str]) -> str:
    """The folder that several names begin with, which the legend need not repeat: 'a/' for a/b and a/c."""
    if len(names) < 2:
        return ""
    folder = names[0][: names[0].rfind("/") + 1]
    return folder if all(name.startswith(folder) for name in names) else ""


def recall_points(evaluations: list[Evaluation], name: str, direction: str) -> list[Point]:
    return [
        (evaluation.samples, recall)
        for evaluation in evaluations
        for held_out in evaluation.retrieval
        if held_out.name == name
        and evaluation.samples is not None
        and (recall := held_out[f"{direction}_recall_at_1"]) is not None
    ]


def time_figure(run: RunContents) -> Figure:
    """Shares of a step's time; 'other' is what is neither data, towers nor normalizer."""
    title, rows = "Time per step", []
    for record in run.records:
        samples, towers = number(record.get("samples")), number(record.get("towers_share"))
        if samples is None or towers is None:
            continue
        # A share is null where the method has no such phase; the rest of the step is still worth showing.
        shares = [min(1.0, max(0.0, number(record.get(key)) or 0.0)) for key in SHARE_KEYS.values()]
        whole = max(1.0, sum(shares))
        shares = [share / whole for share in shares]
        rows.append((samples, [*shares, 1.0 - sum(shares)]))
    if not rows:
        return Figure(title=title, absence="The records do not say how the time of a step is divided.")
    return stacked(title, rows, [*SHARE_KEYS, "other"])
