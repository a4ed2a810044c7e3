"""The report of one run: results, findings about the training, curves, tables, examples, settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from neuclip import files
from neuclip.formatting import (
    byte_size,
    format_count,
    format_duration,
    format_number,
    format_samples,
    percent,
    plural,
    times_chance,
)
from neuclip.records import RunFolder
from neuclip.report.charts import CURVES, Chart, Line, column
from neuclip.report.contents import REMEDY, Figures, RunContents, finite, late_median, read_contents
from neuclip.report.findings import findings, judge_calibration, judge_error
from neuclip.report.measures import (
    BATCH_ERROR_KEY,
    DIRECTIONS,
    ERROR_KEY,
    Measure,
    chance,
    error_chart,
    evaluation_tables,
    find_measures,
    short_names,
    size,
)
from neuclip.report.page import (
    Charts,
    Gallery,
    Match,
    Notes,
    Page,
    Query,
    Section,
    Table,
    Tiles,
    render_html,
    write_page,
)

NOT_EVALUATED = (
    "The model was not evaluated. To learn how good it is, give held-out data (evaluation.retrieval, "
    "evaluation.zero_shot)."
)
ERROR_NOT_MEASURED = (
    "The normalizer error was not measured. Measure it with neuclip error RUN, or during training with "
    "evaluation.error_anchors."
)
NO_EXAMPLES = "There are no examples. The last evaluation of a retrieval set writes them (evaluation.gallery)."


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` into the run's folder and return its path. Missing files are skipped; the same files give the
    same page, byte for byte.

    >>> write_report(RunFolder("runs/first"))  # doctest: +SKIP
    PosixPath('runs/first/report.html')
    """
    return write_page(folder.report, render_html(report_page(read_contents(folder))))


def report_page(run: RunContents) -> Page:
    setting = run.settings.get
    facts = [run.objective, setting("model.name"), setting("data.train"), run.environment.get("data.captions")]
    details = {"Settings": run.settings, "Environment": run.environment}
    sections = [
        Section("", [Tiles(list(tiles(run))), Notes(list(findings(run)), as_list=True)]),
        Section("Curves", [Charts(main_charts(run))] if run.records else [Notes(["There are no records yet."])]),
        *([Section("More curves", [Charts(more)], folded=True)] if (more := more_charts(run)) else []),
        Section("Evaluation", evaluation(run) or [Notes([NOT_EVALUATED])]),
        Section("Normalizer error", [normalizer_table(run) or Notes([ERROR_NOT_MEASURED])]),
        Section("Retrieval examples", galleries(run) or [Notes([NO_EXAMPLES])]),
        Section("Data", [Notes(list(data_notes(run)))]),
        *(Section(title, [mapping_table(values)], folded=True) for title, values in details.items() if values),
    ]
    return Page("training run", run.name, [str(fact) for fact in (*facts, run.started) if fact], notices(run), sections)


def notices(run: RunContents) -> list[str]:
    """Sentences for the top of the page: the progress of an unfinished run, and sets that were not measured."""
    sentences = [f"{name} was not measured: {reason}." for name, reason in run.under("not_measured").items()]
    if run.finished:
        return sentences
    seen, planned = run.samples_seen, run.samples_planned
    progress = f"{format_samples(seen)} samples seen" if seen else "no step is logged yet"
    if seen and planned:
        progress = f"{format_samples(seen)} of {format_samples(planned)} samples seen ({percent(seen / planned)})"
    return [f"This run has not finished: {progress}. The page shows what was written so far.", *sentences]


def tiles(run: RunContents) -> Iterator[tuple[str, str, str]]:
    """The figures at the top: label, value, and a note to judge it by. Unknown figures are left out."""
    for measure in first_measures(run.final):
        value, before = run.final[measure.key], run.before.get(measure.key)
        largest = run.final.get(f"{measure.dataset}.largest_class") if measure.metric == "top1" else None
        notes = [
            f"before {percent(before)}" if before is not None else "",
            times_chance(value, chance(measure, run.final)),
            f"largest class {percent(largest)}" if largest is not None else "",
            ", ".join(filter(None, (measure.dataset, size(measure.dataset, run.final)))),
        ]
        yield measure.words[0].upper() + measure.words[1:], percent(value), "; ".join(filter(None, notes))
    error, batch = run.final.get(ERROR_KEY), run.final.get(BATCH_ERROR_KEY)
    if error is not None:
        yield "Normalizer error", format_number(error), judge_error(error, batch)
    if run.calibration is not None:
        shown = format_number(run.calibration, keep_zeros=True)
        yield "Calibration", shown, f"{judge_calibration(run.calibration)}; median of the last quarter, ideally 1"
    yield from costs(run)


def first_measures(figures: Figures) -> list[Measure]:
    """Recall@1 in both directions on the first retrieval set, and top-1 accuracy of the first task."""
    main = [measure for measure in find_measures(figures) if measure.main]
    recalls = [measure for measure in main if measure.of_retrieval]
    recalls = [measure for measure in recalls if measure.dataset == recalls[0].dataset]
    return [*recalls, *[measure for measure in main if measure.metric == "top1"][:1]]


def costs(run: RunContents) -> Iterator[tuple[str, str, str]]:
    """Time, speed and memory. For an unfinished run only the speed is known, from its last record."""
    if (seconds := run.number("seconds")) is not None:
        yield "Time", format_duration(seconds), f"for {format_samples(run.samples_seen)} samples"
    device, threads = run.environment.get("device"), finite(run.environment).get("threads")
    where = f"on {device}" if device else ""
    if device == "cpu" and threads:
        where += f", {plural(threads, 'thread')}"
    if (speed := run.number("samples_per_second")) is not None:
        yield "Samples per second", format_number(speed), where
    elif (speed := run.last("samples_per_second")) is not None:
        yield "Samples per second", format_number(speed), f"{where} at the last record".strip()
    if (memory := run.number("peak_memory_bytes")) is not None:
        yield "Peak memory", byte_size(memory), ""


def main_charts(run: RunContents) -> list[Chart]:
    """Loss and recall first, then the other curves and the normalizer error. Charts without points are left out."""
    loss, *others = [curve.chart({run.name: [run.records]}) for curve in CURVES if curve.main]
    batch = f"a mini-batch of {run.settings.get('train.batch_size', '?')}"
    names = {ERROR_KEY: run.objective or "this run", BATCH_ERROR_KEY: batch}
    curves = {words: column(run.evaluations, key) for key, words in names.items()}
    errors = error_chart(
        [Line(words, points, colour=i, dash=i) for i, (words, points) in enumerate(curves.items()) if points]
    )
    charts = [loss, recall_chart(run.evaluations), *others, errors, merge_chart(run)]
    return [chart for chart in charts if chart.lines]


def more_charts(run: RunContents) -> list[Chart]:
    charts = [curve.chart({run.name: [run.records]}) for curve in CURVES if not curve.main]
    return [chart for chart in charts if chart.lines]


def recall_chart(lines: list[Figures], title: str = "Recall@1 on held-out data", **options: Any) -> Chart:
    """A chart with one colour per held-out set and one dash pattern per direction; empty with fewer than two
    evaluations."""
    recalls = [one for one in find_measures(lines[-1] if len(lines) > 1 else {}) if one.main and one.of_retrieval]
    names = short_names(list(dict.fromkeys(one.dataset for one in recalls)))
    drawn = [
        Line(
            f"{names[one.dataset]}, {one.words.removesuffix(' recall@1')}",
            column(lines, one.key),
            colour=list(names).index(one.dataset),
            dash=index,
        )
        for index, one in enumerate(recalls)
    ]
    return Chart(title=title, unit="recall@1", lines=drawn, percent=True, dots=True, **options)


def merge_chart(run: RunContents) -> Chart:
    """Recall@1 of the merged models between the start of training and this run (neuclip merge --curve)."""
    lines = [{"samples": line["weight"]} | line for line in run.merges]
    return recall_chart(
        sorted(lines, key=lambda line: line["samples"]),
        "Recall@1 of merged models",
        across="weight of this run",
        note="0 is the model before training, 1 is this run. A weight that is chosen on these sets looks better on "
        "them than it is.",
    )


def evaluation(run: RunContents) -> list[Notes | Table]:
    """The tables of the final evaluation; empty if nothing was evaluated."""
    tables = evaluation_tables(run.final, run.before)
    return [Notes([f"Measured at {format_count(run.final['samples'])} samples."]), *tables] if tables else []


def normalizer_table(run: RunContents) -> Table | None:
    """The error of each estimator against the exact normalizers; None if it was not measured."""
    columns = {"image": "image", "text": "text", "mean": "mean", "mean_without_duplicates": "without duplicates"}
    names = {
        "method": f"{run.objective}, this run" if run.objective else "this run",
        "minibatch": f"a mini-batch of {run.settings.get('train.batch_size', '?')}",
    }
    errors, facts = finite(run.under("normalizer_error.estimators")), run.under("normalizer_error")
    rows = [
        [words, *(format_number(errors.get(f"{name}.{column}"), keep_zeros=True) for column in columns)]
        for name, words in names.items()
        if f"{name}.mean" in errors
    ]
    notes = [
        "Mean squared difference between the estimated and the exact log-normalizer over the whole training set: 0 is "
        "exact.",
        error_facts(finite(facts), late_median(run.records, "share_at_eps")),
        f"{run.objective}: {facts['method_note']}." if facts.get("method_note") else "",
    ]
    return Table("By estimator", ["estimator", *columns.values()], rows, notes=notes) if rows else None


def error_facts(facts: Figures, at_eps: float | None) -> str:
    """A sentence that says how the error was measured, and for how many anchors eps dominates the normalizer."""
    parts = {
        "anchors": lambda count: f"{plural(count, 'anchor')} of the training set",
        "duplicates": lambda count: f"{count:,.0f} of them have a caption that occurs more than once",
        "temperature": lambda value: f"temperature {format_number(value)}",
        "eps": lambda value: f"eps {format_number(value)}",
        "share_at_floor": lambda share: f"at the eps floor: {percent(share)} of the anchors",
    }
    known = [say(facts[name]) for name, say in parts.items() if name in facts]
    in_training = [f"in the batches of the last quarter: {percent(at_eps)}"] if at_eps is not None else []
    return f"{'; '.join([*known, *in_training])}."


def galleries(run: RunContents) -> list[Notes | Gallery]:
    """Held-out queries with their best matches, in both directions."""
    with files.reading(run.folder.gallery, REMEDY):
        queries = {name: [read_query(one) for one in run.gallery.get(name, [])] for name in list(DIRECTIONS)[:2]}
        lead = f"From {run.gallery.get('dataset')}. The queries are drawn at random with the run's seed."
    blocks = [
        Gallery(f"{DIRECTIONS[name][0].capitalize()}: {count_right(listed)}", listed)
        for name, listed in queries.items()
        if listed
    ]
    return [Notes([lead]), *blocks] if blocks else []


def read_query(query: Mapping[str, Any]) -> Query:
    matches = [
        Match(str(one["caption"]), str(one.get("image", "")), float(one["score"]), one["right"] is True)
        for one in query["matches"]
    ]
    return Query(str(query["caption"]), str(query.get("image", "")), float(query["rank"]), matches)


def count_right(queries: list[Query]) -> str:
    """'the first match is right for 3 of 12 queries, one of the first 5 for 7'"""
    first = sum(any(match.right for match in query.matches[:1]) for query in queries)
    among = sum(any(match.right for match in query.matches) for query in queries)
    most = max(len(query.matches) for query in queries)
    return f"the first match is right for {first} of {len(queries)} queries, one of the first {most} for {among}"


def data_notes(run: RunContents) -> Iterator[str]:
    """Sentences on skipped samples and their reasons, in training and in each held-out set, and on truncated
    captions."""
    if not run.summary:
        yield "Skipped samples are counted at the end of the run; skipped.jsonl lists them."
    skipped = finite(run.under("skipped"))
    held_out = finite(run.under("skipped_held_out"))
    for reason, count in skipped.items():
        yield f"Skipped {plural(count, 'sample')} of the training data: {reason}."
    for key, count in held_out.items():
        name, _, reason = key.rpartition(".")
        yield f"Skipped {plural(count, 'sample')} of the held-out {name}: {reason}."
    if run.summary and not skipped and not held_out:
        yield "No sample was skipped."
    if (share := run.last("truncated_captions")) is not None:
        yield f"{percent(share)} of the captions fill the context (possibly truncated)."


def mapping_table(values: Mapping[str, Any]) -> Table:
    return Table("", ["name", "value"], [[name, setting_text(value)] for name, value in values.items()], 2)


def setting_text(value: Any) -> str:
    """A value as it is written in a recipe; 'default' for None."""
    if value is None:
        return "default"
    return value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)
