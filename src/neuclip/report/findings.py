"""Findings about a run: how training went and what to try next. Each rule is a generator of sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from neuclip.formatting import format_number, format_ratio, format_samples, percent, plural
from neuclip.report.charts import column
from neuclip.report.contents import RunContents, finite
from neuclip.report.measures import DIRECTIONS, chance, find_measures
from neuclip.settings.objectives import OBJECTIVES

GOOD_CALIBRATION, FAIR_CALIBRATION = 1.15, 1.5  # largest factors above or below 1
MANY_TRUNCATED = 0.05  # share of the captions
AT_LIMIT = 1.01  # a temperature within this factor of its bound
FEW_EPOCHS = 5
STILL_RISING = 1.05  # recall at least this factor above the evaluation before
DEVIATIONS = 3  # standard deviations by which a share must differ: one chance in 700
OVERFITTING = "Try more data, a smaller data.crop_scale, more optimizer.weight_decay, or fewer train.samples."
FORGETTING = (
    "To keep more of what the model knew before, merge both models (neuclip merge) or lower optimizer.learning_rate."
)


def findings(run: RunContents) -> Iterator[str]:
    """All findings about a run. The rule `budget`, which asks for more samples, is for finished runs only."""
    for rule in (guessing, loss_course, calibration, temperature, capped, captions):
        yield from rule(run)
    fallen = list(fallen_recall(run))
    yield from fallen
    if run.finished and not fallen:
        yield from budget(run)


def guessing(run: RunContents) -> Iterator[str]:
    """Sets on which the model is no better than chance, or no better than always naming the largest class."""
    by_set: dict[tuple[str, str], list[str]] = {}
    for measure, value in find_measures(run.final).items():
        if not measure.main or not (measure.of_retrieval or measure.metric == "top1"):
            continue
        queries = DIRECTIONS[measure.metric.split("_recall")[0]][1] if measure.of_retrieval else "images"
        count = run.final.get(f"{measure.dataset}.{queries}")
        baselines = {"guessing": chance(measure, run.final)}
        if measure.metric == "top1":
            baselines["always naming the largest class"] = run.final.get(f"{measure.dataset}.largest_class")
        for words, baseline in baselines.items():
            if baseline is not None and count and value <= baseline + sampling_error(baseline, count):
                by_set.setdefault((measure.dataset, words), []).append(f"{measure.words} ({percent(value)})")
                break
    for (dataset, words), figures in by_set.items():
        verb = "is" if len(figures) == 1 else "are"
        yield f"On {dataset}, {' and '.join(figures)} {verb} no better than {words}."


def sampling_error(share: float, count: float) -> float:
    """Three standard deviations of a share that is measured on `count` random queries."""
    return DEVIATIONS * math.sqrt(max(0.0, share * (1 - share) / count))


def loss_course(run: RunContents) -> Iterator[str]:
    """A loss that did not fall, or that rose again: compares the medians of the first, the lowest and the last tenth of
    the records."""
    losses = [record["loss"] for record in run.records if "loss" in record]
    length = max(1, len(losses) // 10)
    tenths = [median(losses[start : start + length]) for start in range(0, len(losses) - length + 1, length)]
    if len(tenths) < 2:
        return
    first, lowest, last = (format_number(value) for value in (tenths[0], min(tenths), tenths[-1]))
    advice = "Try a lower optimizer.learning_rate or a longer optimizer.warmup."
    if tenths[-1] >= tenths[0]:
        yield f"The loss did not fall: it was {first} at first and {last} at last. {advice}"
    elif tenths[-1] - min(tenths) > (tenths[0] - min(tenths)) / 2:
        yield f"The loss fell from {first} to {lowest} and rose again to {last}. {advice}"


def calibration(run: RunContents) -> Iterator[str]:
    """A poor calibration, with the method's own advice. There is no finding for a queue: calibration judges the
    prediction before the batch is seen, but a queue contains the batch when the loss is computed. The best queues of
    experiment `comparison` have a calibration that is off by a factor of two."""
    value = run.calibration
    if run.settings.get("objective.restart") == "rolling":
        return
    if value is None or value <= 0 or max(value, 1 / value) <= FAIR_CALIBRATION:
        return
    shown = format_number(value, keep_zeros=True)
    yield f"Calibration is {shown}: {judge_calibration(value)}. {calibration_advice(run)}".rstrip()


def calibration_advice(run: RunContents) -> str:
    name = run.settings.get("objective.name")
    return OBJECTIVES[name].calibration_advice if name in OBJECTIVES else ""


def judge_calibration(value: float) -> str:
    """'good', or by which factor the predicted normalizers are too small or too large. Those that are too small give
    hard anchors too much weight."""
    off = max(value, 1 / value) if value > 0 else math.inf
    if off <= GOOD_CALIBRATION:
        return "good"
    if math.isinf(off):
        return "predicted normalizers are far too large"
    return f"predicted normalizers are {format_ratio(off)} too {'small' if value > 1 else 'large'}"


def judge_error(error: float | None, batch: float | None) -> str:
    """'7.5x smaller than a mini-batch's'; empty if one of them was not measured."""
    if error is None or not batch:
        return ""
    if error == 0:
        return "zero, the prediction is exact"
    ratio = batch / error
    if max(ratio, 1 / ratio) < 1.1:
        return "as large as a mini-batch's"
    return f"{format_ratio(max(ratio, 1 / ratio))} {'smaller' if ratio > 1 else 'larger'} than a mini-batch's"


def temperature(run: RunContents) -> Iterator[str]:
    """A learned temperature that stopped at its minimum or maximum. No finding if it started there."""
    final = run.number("temperature")
    value = run.last("temperature") if final is None else final
    initial, minimum, maximum = (
        finite(run.settings).get(f"temperature.{name}") for name in ("initial", "minimum", "maximum")
    )
    if value is None:
        return
    if minimum is not None and value <= minimum * AT_LIMIT and initial != minimum:
        yield (
            f"The temperature is at its minimum, {format_number(minimum)}. To keep it higher, try a smaller "
            "temperature.learning_rate or, if the objective has it, a smaller objective.rho."
        )
    if maximum is not None and value >= maximum / AT_LIMIT and initial != maximum:
        yield (
            f"The temperature is at its maximum, {format_number(maximum)}. Check that images and captions belong "
            "together: no temperature separates them."
        )


def capped(run: RunContents) -> Iterator[str]:
    """Anchors whose exponent was capped because the number format cannot represent the result."""
    most = max((record.get("capped", 0.0) for record in run.records), default=0.0)
    if most > 0:
        sentence = f"Exponents were capped for up to {plural(most, 'anchor')} in a batch"
        yield f"{sentence}: their predicted normalizers were far too small. {calibration_advice(run)}".rstrip()


def captions(run: RunContents) -> Iterator[str]:
    if (share := run.last("truncated_captions") or 0.0) > MANY_TRUNCATED:
        yield (
            f"{percent(share)} of the captions fill the context and may be truncated. Shorten them, or use a model "
            "with a longer context (model.name)."
        )


def fallen_recall(run: RunContents) -> Iterator[str]:
    """Sets on which the model was clearly better earlier. If that was before training, it forgot; if it was during
    training and samples were seen more than once, it overfits."""
    for measure, last in find_measures(run.final).items():
        points = column(run.evaluations, measure.key)
        images = run.final.get(f"{measure.dataset}.images")
        if measure.metric != "image_to_text_recall_at_1" or not images or not points:
            continue
        samples, best = max(points, key=lambda point: point[1])
        if best - sampling_error(best, images) <= last or (samples and (run.last("epoch") or 0.0) <= 1):
            continue
        when = f"at {format_samples(samples)} samples" if samples else "before training"
        yield (
            f"Recall@1 on {measure.dataset} was {percent(best)} {when} and fell to {percent(last)}. "
            f"{OVERFITTING if samples else FORGETTING}"
        )


def budget(run: RunContents) -> Iterator[str]:
    """Advice to train longer if each sample was seen rarely, or if recall on the first set was still rising at the
    end."""
    epochs, reasons = run.last("epoch") or FEW_EPOCHS, []
    if epochs < 1:
        reasons.append(f"only {percent(epochs)} of the data was seen")
    elif epochs < FEW_EPOCHS:
        reasons.append(f"each sample was seen {epochs:.1f} times")
    first = next((one for one in find_measures(run.final) if one.metric == "image_to_text_recall_at_1"), None)
    recalls = [recall for _, recall in column(run.evaluations, first.key)] if first else []
    if len(recalls) > 1 and recalls[-1] > STILL_RISING * recalls[-2]:
        reasons.append("recall@1 was still rising")
    if reasons:
        yield f"Train longer (train.samples): {' and '.join(reasons)}."
