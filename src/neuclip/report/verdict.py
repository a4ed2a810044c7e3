"""A run's figures in words: how good it is, whether training went well, what to try next. One rule, one function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from neuclip.formatting import format_number, format_ratio, format_samples, percent, times_chance
from neuclip.report.contents import RunContents, late_median, number
from neuclip.report.evaluations import Evaluation, HeldOutSet, before_training

GOOD_CALIBRATION, FAIR_CALIBRATION = 1.15, 1.5  # factors from 1, up or down (docs/results.md: 0.97 to 1.11 are best)
MANY_TRUNCATED = 0.05  # of the captions
AT_LIMIT = 1.01  # a temperature within this factor of its bound
FEW_EPOCHS = 5
GAP = 0.25  # between accuracy in training and on held-out data
STILL_RISING = 1.05  # by this factor from the evaluation before
DEVIATIONS = 3  # by which a share must differ to count: one chance in 700
MOST_ADVICE = 2  # a longer list would not be read
# What brings the prediction nearer to the truth.
CALIBRATION_ADVICE = {
    "neuclip": "more objective.inner_steps or a smaller objective.restart_every",
    "fastclip": "a larger objective.gamma",
}
OVERFITTING_ADVICE = (
    "The model overfits: try more data, stronger augmentation (a smaller data.crop_scale), "
    "more optimizer.weight_decay, or fewer train.samples."
)


class Finding(NamedTuple):
    """What a rule sees, and what to do about it; empty where there is nothing to say."""

    sentence: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Verdict:
    """Three short paragraphs; any may be empty."""

    result: str
    training: str
    advice: str

    @property
    def rows(self) -> list[tuple[str, str]]:
        rows = [("Result", self.result), ("Training", self.training), ("Try next", self.advice)]
        return [(title, text) for title, text in rows if text]


def verdict(run: RunContents, evaluations: Sequence[Evaluation]) -> Verdict:
    """What can be said from the files there are; of an unfinished run not that it needs more samples."""
    if not run.records and not evaluations:
        return Verdict("", "", "")
    last = evaluations[-1] if evaluations else None
    held_out = last.retrieval[0] if last and last.retrieval else None
    temperature = number(run.summary.get("temperature"))
    limits = [number(run.setting("temperature", name)) for name in ("initial", "minimum", "maximum")]
    epochs, recalls = run.last_value("epoch"), recall_curve(held_out, evaluations)
    overfitting = fallen_recall_finding(epochs, recalls, held_out)
    if not overfitting.sentence:
        overfitting = gap_finding(epochs, late_median(run.records, "accuracy"), run.batch_size, held_out)
    training = [
        loss_finding([value for record in run.records if (value := number(record.get("loss"))) is not None]),
        calibration_finding(run.calibration, str(run.setting("objective", "name"))),
        error_finding(*run.normalizer_errors),
        temperature_finding(run.last_value("temperature") if temperature is None else temperature, *limits),
        captions_finding(run.truncated_captions),
        overfitting,
        forgetting_finding(before_training(evaluations), last),
    ]
    result = result_finding(last, run.finished)
    advice = [finding.advice for finding in (*training, result)]
    if run.finished and not overfitting.sentence:
        advice.append(budget_advice(epochs, [recall for _, recall in recalls]))
    if run.finished and not any(advice):
        advice.append("Nothing stands out: the next steps are more data or a larger model (model.name).")
    return Verdict(
        result.sentence,
        " ".join(finding.sentence for finding in training if finding.sentence),
        " ".join([text for text in advice if text][:MOST_ADVICE]),
    )


def result_finding(last: Evaluation | None, finished: bool) -> Finding:
    """Recall@1 against chance on the first retrieval set, else accuracy on the first zero-shot task."""
    if last and last.retrieval:
        return retrieval_finding(last.retrieval[0])
    if last and last.zero_shot:
        return zero_shot_finding(last.zero_shot[0])
    if not finished:  # the evaluation may come at the end
        return Finding("Nothing was evaluated so far.")
    advice = "Give held-out data (evaluation.retrieval, evaluation.zero_shot) to learn how good the model is."
    return Finding("Nothing was evaluated on held-out data.", advice)


def retrieval_finding(held_out: HeldOutSet) -> Finding:
    nouns = {"image_to_text": ("caption", "images"), "text_to_image": ("image", "captions")}
    parts, lucky = [], []
    for direction, (answer, queries) in nouns.items():
        recall, chance = held_out.recall_and_chance(direction)
        if recall is not None:
            against = f" ({times_chance(recall, chance)})" if chance else ""
            parts.append(f"the right {answer} comes first for {percent(recall)} of the {queries}{against}")
            lucky.append(not is_above(recall, chance, held_out[queries]))
    if not parts:
        return Finding()
    sentence = f"On {held_out.name}, {', '.join(parts)}."
    return Finding(f"{sentence} This is no better than guessing." if all(lucky) else sentence)


def zero_shot_finding(task: HeldOutSet) -> Finding:
    top1, chance, largest = task["top1"], task["chance"], task["largest_class"]
    if top1 is None:
        return Finding()
    against = f" ({times_chance(top1, chance)})" if chance else ""
    sentence = f"On {task.name}, the right class comes first for {percent(top1)} of the images{against}."
    if not is_above(top1, chance, task["images"]):
        return Finding(f"{sentence} This is no better than guessing.")
    if largest is not None and not is_above(top1, largest, task["images"]):
        return Finding(f"{sentence} Always naming the largest class would give {percent(largest)}.")
    return Finding(sentence)


def is_above(share: float, standard: float | None, count: float | None) -> bool:
    """Whether a share of `count` queries is above `standard` by more than luck explains; yes where nobody can know."""
    if standard is None or not count:
        return True
    return share > standard + luck(standard, count)


def luck(share: float, count: float) -> float:
    """By how much a share of `count` random queries may be off; damaged files may hold any number."""
    return DEVIATIONS * math.sqrt(max(0.0, share * (1 - share) / count))


def loss_finding(losses: Sequence[float]) -> Finding:
    """The median loss of the first, the lowest and the last tenth of the records."""
    size = max(1, len(losses) // 10)
    tenths = [median(losses[start : start + size]) for start in range(0, len(losses) - size + 1, size)]
    if len(tenths) < 2:
        return Finding()
    first, lowest, last = tenths[0], min(tenths), tenths[-1]
    slower = "Try a lower optimizer.learning_rate or a longer optimizer.warmup."
    if last >= first:
        return Finding(f"The loss did not fall: {format_number(first)} first, {format_number(last)} last.", slower)
    if last - lowest > (first - lowest) / 2:
        course = f"from {format_number(first)} to {format_number(lowest)} and rose again to {format_number(last)}"
        return Finding(f"The loss fell {course}.", slower)
    return Finding(f"The loss fell from {format_number(first)} to {format_number(last)}.")


def calibration_finding(calibration: float | None, objective: str) -> Finding:
    if calibration is None or calibration <= 0:
        return Finding()
    poor = max(calibration, 1 / calibration) > FAIR_CALIBRATION
    advice = CALIBRATION_ADVICE.get(objective, "") if poor else ""
    return Finding(
        f"Calibration is {format_number(calibration)}: {judge_calibration(calibration)}.",
        f"For a better calibration, try {advice}." if advice else "",
    )


def judge_calibration(calibration: float) -> str:
    """'good', or what the figure means: a prediction that is too low gives hard anchors too much weight."""
    off = max(calibration, 1 / calibration) if calibration > 0 else math.inf
    if off <= GOOD_CALIBRATION:
        return "good"
    if math.isinf(off):
        return "poor, predicted normalizers are far too large"
    word = "fair" if off <= FAIR_CALIBRATION else "poor"
    return f"{word}, predicted normalizers are {format_ratio(off)} too {'small' if calibration > 1 else 'large'}"


def error_finding(method: float | None, batch: float | None) -> Finding:
    judgement = judge_error(method, batch)
    return Finding(f"The normalizer error is {judgement}." if judgement else "")


def judge_error(method: float | None, batch: float | None) -> str:
    """'7.5x smaller than a mini-batch's'; empty where one of them was not measured."""
    if method is None or batch is None or method < 0 or batch <= 0:
        return ""
    if method == 0:
        return "zero, the prediction is exact"
    ratio = batch / method
    if max(ratio, 1 / ratio) < 1.1:
        return "as large as a mini-batch's"
    return f"{format_ratio(max(ratio, 1 / ratio))} {'smaller' if ratio > 1 else 'larger'} than a mini-batch's"


def temperature_finding(
    temperature: float | None, initial: float | None, minimum: float | None, maximum: float | None
) -> Finding:
    """A temperature that was meant to move and lies at a bound would have gone further."""
    if temperature is None:
        return Finding()
    if minimum is not None and temperature <= minimum * AT_LIMIT and initial != minimum:
        return Finding(
            f"The temperature is at its minimum, {format_number(minimum)}.",
            "For a higher temperature, try a smaller temperature.learning_rate or, where there is one, objective.rho.",
        )
    if maximum is not None and temperature >= maximum / AT_LIMIT and initial != maximum:
        return Finding(
            f"The temperature is at its maximum, {format_number(maximum)}.",
            "Check that images and captions belong together: no temperature separates them.",
        )
    return Finding()


def captions_finding(share: float | None) -> Finding:
    if share is None or share <= MANY_TRUNCATED:
        return Finding()
    return Finding(
        f"{percent(share)} of the captions fill the context and may be cut.",
        "Shorten the captions, or take a model with a longer context (model.name).",
    )


def recall_curve(held_out: HeldOutSet | None, evaluations: Sequence[Evaluation]) -> list[tuple[float, float]]:
    """Samples seen and recall@1 from image to text on the set of the last evaluation, from the first step on."""
    return [
        (evaluation.samples, recall)
        for evaluation in evaluations
        for one in evaluation.retrieval
        if held_out and one.name == held_out.name and evaluation.samples
        if (recall := one["image_to_text_recall_at_1"]) is not None
    ]


def fallen_recall_finding(
    epochs: float | None, recalls: Sequence[tuple[float, float]], held_out: HeldOutSet | None
) -> Finding:
    """Recall that was clearly better before; not in the first epoch, in which no sample was seen twice."""
    images = held_out["images"] if held_out else None
    if epochs is None or epochs <= 1 or not recalls or not images:
        return Finding()
    (samples, best), last = max(recalls, key=lambda point: point[1]), recalls[-1][1]
    if best - luck(best, images) <= last:
        return Finding()
    sentence = f"Recall@1 was {percent(best)} at {format_samples(samples)} samples and fell to {percent(last)}."
    return Finding(sentence, OVERFITTING_ADVICE)


def forgetting_finding(before: Evaluation | None, last: Evaluation | None) -> Finding:
    """The sets on which the model was clearly better before it was trained further."""
    fallen = []
    for held_out in last.retrieval if last else []:
        start = before.find(held_out.name) if before else None
        recall, first = held_out["image_to_text_recall_at_1"], start["image_to_text_recall_at_1"] if start else None
        if recall is not None and first is not None and first - luck(first, held_out["images"] or 1) > recall:
            fallen.append(f"{percent(first)} to {percent(recall)} on {held_out.name}")
    if not fallen:
        return Finding()
    return Finding(
        f"Since the start, recall@1 fell from {', from '.join(fallen)}.",
        "To keep more of what the model knew, merge both (neuclip merge --curve shows what it gives), "
        "or lower optimizer.learning_rate.",
    )


def gap_finding(
    epochs: float | None, accuracy: float | None, batch_size: int | None, held_out: HeldOutSet | None
) -> Finding:
    """In-batch accuracy against held-out recall among about as many candidates as a batch has.

    To be first of B is as hard as to be among the first N/B of N: accuracy is compared with the next larger recall@k.
    """
    if not held_out or epochs is None or epochs < FEW_EPOCHS or accuracy is None or not batch_size:
        return Finding()
    # Equal captions would make it harder than a batch is, several captions per image easier.
    direction = "image_to_different_text" if held_out["different_captions"] else "image_to_text"
    sizes = [size for key in ("images", "captions", "different_captions") if (size := held_out[key])]
    depth = next((k for k in held_out.depths(direction) if sizes and k >= min(sizes) / batch_size), None)
    recall = held_out[f"{direction}_recall_at_{depth}"]
    if recall is None or accuracy - recall < GAP:
        return Finding()
    sentence = f"In training {percent(accuracy)} of a batch are right, on held-out data only {percent(recall)}"
    return Finding(f"{sentence} at equal difficulty (recall@{depth}).", OVERFITTING_ADVICE)


def budget_advice(epochs: float | None, recalls: Sequence[float]) -> str:
    """More samples where each was seen rarely, or where recall was still rising at the end."""
    reasons = []
    if epochs is not None and 0 < epochs < 1:
        reasons.append(f"only {percent(epochs)} of the data was seen")
    elif epochs is not None and 1 <= epochs < FEW_EPOCHS:
        reasons.append(f"each sample was seen {epochs:.1f} times")
    if len(recalls) > 1 and recalls[-1] > STILL_RISING * recalls[-2]:
        reasons.append("recall@1 was still rising")
    return f"Train longer (train.samples): {' and '.join(reasons)}." if reasons else ""
