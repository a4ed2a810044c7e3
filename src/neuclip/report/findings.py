"""How training went and what to try next: one rule, one generator of sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from neuclip.formatting import format_number, format_ratio, format_samples, percent, plural
from neuclip.report.charts import column
from neuclip.report.contents import RunContents, finite
from neuclip.report.measures import DIRECTIONS, chance, measured
from neuclip.settings.objectives import OBJECTIVES

GOOD_CALIBRATION, FAIR_CALIBRATION = 1.15, 1.5  # factors from 1, up or down
MANY_TRUNCATED = 0.05  # of the captions
AT_LIMIT = 1.01  # a temperature within this factor of its bound
FEW_EPOCHS = 5
STILL_RISING = 1.05  # by this factor from the evaluation before
DEVIATIONS = 3  # by which a share must differ to count: one chance in 700
OVERFITTING = "Try more data, a smaller data.crop_scale, more optimizer.weight_decay, or fewer train.samples."
FORGETTING = "To keep more of what the model knew, merge both (neuclip merge), or lower optimizer.learning_rate."


def findings(run: RunContents) -> Iterator[str]:
    """How training went and what to try next; of an unfinished run not that it needs more samples."""
    for rule in (guessing, loss_course, calibration, temperature, capped, captions):
        yield from rule(run)
    fallen = list(fallen_recall(run))
    yield from fallen
    if run.finished and not fallen:
        yield from budget(run)


def guessing(run: RunContents) -> Iterator[str]:
    """Sets on which the model is no better than chance, or a task than naming its largest class."""
    by_set: dict[tuple[str, str], list[str]] = {}
    for measure, value in measured(run.final).items():
        if not measure.main or not (measure.of_retrieval or measure.metric == "top1"):
            continue
        asked = DIRECTIONS[measure.metric.split("_recall")[0]][1] if measure.of_retrieval else "images"
        count = run.final.get(f"{measure.dataset}.{asked}")
        standards = {"guessing": chance(measure, run.final)}
        if measure.metric == "top1":
            standards["always naming the largest class"] = run.final.get(f"{measure.dataset}.largest_class")
        for words, standard in standards.items():
            if standard is not None and count and value <= standard + luck(standard, count):
                by_set.setdefault((measure.dataset, words), []).append(f"{measure.words} ({percent(value)})")
                break
    for (dataset, words), figures in by_set.items():
        verb = "is" if len(figures) == 1 else "are"
        yield f"On {dataset}, {' and '.join(figures)} {verb} no better than {words}."


def luck(share: float, count: float) -> float:
    """By how much a share of `count` random queries may be off."""
    return DEVIATIONS * math.sqrt(max(0.0, share * (1 - share) / count))


def loss_course(run: RunContents) -> Iterator[str]:
    """The median loss of the first, the lowest and the last tenth of the records."""
    losses = [record["loss"] for record in run.records if "loss" in record]
    length = max(1, len(losses) // 10)
    tenths = [median(losses[start : start + length]) for start in range(0, len(losses) - length + 1, length)]
    if len(tenths) < 2:
        return
    first, lowest, last = (format_number(value) for value in (tenths[0], min(tenths), tenths[-1]))
    advice = "Try a lower optimizer.learning_rate or a longer optimizer.warmup."
    if tenths[-1] >= tenths[0]:
        yield f"The loss did not fall: {first} first, {last} last. {advice}"
    elif tenths[-1] - min(tenths) > (tenths[0] - min(tenths)) / 2:
        yield f"The loss fell from {first} to {lowest} and rose again to {last}. {advice}"


def calibration(run: RunContents) -> Iterator[str]:
    """A poor one, with the method's own advice. It is that of a prediction before the batch was seen: a queue holds the
    batch when the loss is taken, and the best ones of experiment `comparison` are off by a factor of two."""
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
    """'good', or what the figure means: a prediction that is too low gives hard anchors too much weight."""
    off = max(value, 1 / value) if value > 0 else math.inf
    if off <= GOOD_CALIBRATION:
        return "good"
    if math.isinf(off):
        return "predicted normalizers are far too large"
    return f"predicted normalizers are {format_ratio(off)} too {'small' if value > 1 else 'large'}"


def judge_error(error: float | None, batch: float | None) -> str:
    """'7.5x smaller than a mini-batch's'; empty where one of them was not measured."""
    if error is None or not batch:
        return ""
    if error == 0:
        return "zero, the prediction is exact"
    ratio = batch / error
    if max(ratio, 1 / ratio) < 1.1:
        return "as large as a mini-batch's"
    return f"{format_ratio(max(ratio, 1 / ratio))} {'smaller' if ratio > 1 else 'larger'} than a mini-batch's"


def temperature(run: RunContents) -> Iterator[str]:
    """A temperature that was meant to move and lies at a bound would have gone further."""
    final = run.number("temperature")
    value = run.last("temperature") if final is None else final
    initial, minimum, maximum = (
        finite(run.settings).get(f"temperature.{name}") for name in ("initial", "minimum", "maximum")
    )
    if value is None:
        return
    if minimum is not None and value <= minimum * AT_LIMIT and initial != minimum:
        yield (
            f"The temperature is at its minimum, {format_number(minimum)}. For a higher one, try a smaller "
            "temperature.learning_rate or, where there is one, objective.rho."
        )
    if maximum is not None and value >= maximum / AT_LIMIT and initial != maximum:
        yield (
            f"The temperature is at its maximum, {format_number(maximum)}. Check that images and captions belong "
            "together: no temperature separates them."
        )


def capped(run: RunContents) -> Iterator[str]:
    """Anchors whose exponent was cut to what the number format holds."""
    most = max((record.get("capped", 0.0) for record in run.records), default=0.0)
    if most > 0:
        sentence = f"Exponents were capped, of up to {plural(most, 'anchor')} in a batch"
        yield f"{sentence}: their predicted normalizers were far too small. {calibration_advice(run)}".rstrip()


def captions(run: RunContents) -> Iterator[str]:
    if (share := run.last("truncated_captions") or 0.0) > MANY_TRUNCATED:
        yield (
            f"{percent(share)} of the captions fill the context and may be cut. Shorten them, or take a model with a "
            "longer context (model.name)."
        )


def fallen_recall(run: RunContents) -> Iterator[str]:
    """Sets on which the model was clearly better earlier: before training, then it forgot; later, then it overfits,
    unless no sample was seen twice."""
    for measure, last in measured(run.final).items():
        points = column(run.evaluations, measure.key)
        images = run.final.get(f"{measure.dataset}.images")
        if measure.metric != "image_to_text_recall_at_1" or not images or not points:
            continue
        samples, best = max(points, key=lambda point: point[1])
        if best - luck(best, images) <= last or (samples and (run.last("epoch") or 0.0) <= 1):
            continue
        when = f"at {format_samples(samples)} samples" if samples else "before training"
        yield (
            f"Recall@1 on {measure.dataset} was {percent(best)} {when} and fell to {percent(last)}. "
            f"{OVERFITTING if samples else FORGETTING}"
        )


def budget(run: RunContents) -> Iterator[str]:
    """More samples where each was seen rarely, or where recall on the first set was still rising at the end."""
    epochs, reasons = run.last("epoch") or FEW_EPOCHS, []
    if epochs < 1:
        reasons.append(f"only {percent(epochs)} of the data was seen")
    elif epochs < FEW_EPOCHS:
        reasons.append(f"each sample was seen {epochs:.1f} times")
    first = next((one for one in measured(run.final) if one.metric == "image_to_text_recall_at_1"), None)
    recalls = [recall for _, recall in column(run.evaluations, first.key)] if first else []
    if len(recalls) > 1 and recalls[-1] > STILL_RISING * recalls[-2]:
        reasons.append("recall@1 was still rising")
    if reasons:
        yield f"Train longer (train.samples): {' and '.join(reasons)}."
