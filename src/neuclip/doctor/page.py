"""The findings on one screen: a heading and a few aligned lines for each part, then what to do about it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from neuclip.doctor.findings import Findings
from neuclip.doctor.wording import byte_size, percent, plural

HEADING = 12  # columns
UNIT = r"(\d) (?=(?:[kMG]B|times|steps)\b|%)"
Line = tuple[str, str]  # heading or nothing, text


def page_text(findings: Findings, width: int) -> str:
    """All parts, wrapped to `width`; only captions are cut."""
    lines = [_wrapped(heading, text, width) for heading, text in _lines(findings, width)] if findings.figures else []
    for sign, advices in (("warning", findings.warnings), ("problem", findings.problems)):
        lines += [_wrapped(sign, str(advice), width) for advice in advices]
    lines.append(_verdict(findings))
    return "".join(f"{line}\n" for line in lines)


def _lines(findings: Findings, width: int) -> Iterator[Line]:
    yield from _data_lines(findings, width)
    yield from _quality_lines(findings)
    yield from _plan_lines(findings)
    yield from _objective_lines(findings)
    yield from _room_lines(findings)


def _data_lines(f: Findings, width: int) -> Iterator[Line]:
    size = "" if f["data.file_bytes"] is None else f", {byte_size(f['data.file_bytes'])}"
    files = f"{plural(f['data.files'], 'file')} ({f['data.kind']}{size})"
    yield "data", f"{f['data.address']}: {f['data.pairs']:,} pairs in {files}"
    whole = "all" if f["sample.share"] == 1 else f"{percent(f['sample.share'])}, {f['sample.chosen']}"
    yield "looked at", f"{f['sample.pairs']:,} pairs: {whole}"
    heading = "samples"
    for one in f["sample.shown"]:
        caption = " ".join(one["caption"].split())
        line = f"{one['id']:>9}  {one['width']:>5} x {one['height']:<5}  {caption}"
        yield heading, line if len(line) <= width - HEADING else f"{line[: width - HEADING - 3]}..."
        heading = ""
    if "sample.sheet" in f.figures:
        yield heading, f"contact sheet: {f['sample.sheet']}"


def _quality_lines(f: Findings) -> Iterator[Line]:
    if "pictures.modes" in f.figures:
        sides = [f"{_span(f, 'pictures', side)} {word}" for side, word in (("width", "wide"), ("height", "high"))]
        modes = ", ".join(
            f"{mode} {percent(count / sum(f['pictures.modes'].values()))}"
            for mode, count in f["pictures.modes"].items()
        )
        yield "pictures", f"{sides[0]}, {sides[1]}; {modes}; {byte_size(f['pictures.mean_bytes'])} each"
        yield "", f"{percent(f['pictures.small_share'])} smaller than the model's {_image(f)}"
    if "captions.median_tokens" in f.figures:
        cut = percent(f["captions.cut_off_share"])
        yield (
            "captions",
            f"{_span(f, 'captions', 'tokens')} tokens; {cut} are cut off at the model's {f['captions.context_tokens']}",
        )
    yield "", _equal(f)
    bad = ", ".join(f"{count} x {reason}" for reason, count in f["bad.reasons"].items()) or "none"
    yield "bad pairs", f"{bad}; a run stops above {percent(f['bad.limit'])}"


def _span(f: Findings, section: str, what: str) -> str:
    low, middle, high = (f[f"{section}.{name}_{what}"] for name in ("smallest", "median", "largest"))
    return f"{low}" if low == high else f"{low} to {high} (median {middle:g})"


def _equal(f: Findings) -> str:
    met = f"{percent(f['captions.equal_in_batch_share'])} of a batch meet an equal one"
    if f["captions.equal_share"] is None:
        return f"{met} (from {f['captions.counted']:,} captions)"
    commonest = f"; commonest: {f['captions.commonest']!r}, {f['captions.commonest_count']:,} times"
    often = commonest if f["captions.commonest_count"] > 1 else ""
    return f"{percent(f['captions.equal_share'])} of all share theirs with another, {met}{often}"


def _plan_lines(f: Findings) -> Iterator[Line]:
    yield (
        "model",
        f"{f['model.name']}: {f['model.parameters'] / 1e6:.1f} M parameters, {_image(f)} pixels, "
        f"{f['model.context_tokens']} tokens, width {f['model.embed_dim']}",
    )
    yield (
        "plan",
        f"{f['plan.steps']:,} steps of {f['plan.batch_size']:,} = {f['plan.samples']:,} samples = "
        f"{f['plan.epochs']:.3g} epochs of {f['plan.batches_per_epoch']:,.1f} steps",
    )
    ranks = "1 process" if f["plan.ranks"] == 1 else f"{f['plan.ranks']:,} processes"
    chunks = "" if f["plan.micro_batch"] == f["plan.batch_per_rank"] else f" ({f['plan.micro_batch']} at a time)"
    yield (
        "",
        f"{ranks}, {f['plan.batch_per_rank']:,} pairs a step{chunks} and {f['plan.samples_per_rank']:,} samples each, "
        f"{plural(f['plan.workers_per_rank'], 'worker')}; warm-up {f['plan.warmup_steps']:,} steps "
        f"({percent(f['plan.warmup_share'])})",
    )
    moves = {"no": ", constant", "per sample": ", one per sample"}.get(
        f["temperature.learned"], f", can fall to {f['temperature.lowest_in_reach'] or 0:.3g} in this run"
    )
    yield (
        "temperature",
        f"starts at {f['temperature.initial']:g}{moves} (range {f['temperature.minimum']:g} to "
        f"{f['temperature.maximum']:g})",
    )


def _objective_lines(f: Findings) -> Iterator[Line]:
    yield (
        "objective",
        f"{f['objective.name']}; the first loss should be {f['objective.first_loss']:.3g} or a little more",
    )
    pairs_over_batch = f"n/B = {f['plan.batches_per_epoch']:,.1f}"
    if "objective.steps_to_fill" in f.figures:
        every = f["objective.steps_between_renewals"]
        renewed = f"renewed every {every:,} steps, {f['objective.renewals']:,} times" if every else "never renewed"
        yield (
            "",
            f"{f['objective.prototypes']:,} prototypes stand for {f['data.pairs']:,} pairs ({pairs_over_batch}), "
            f"filled after {plural(f['objective.steps_to_fill'], 'step')} (m/B), {renewed}",
        )
    elif "objective.visits_per_pair" in f.figures:
        yield (
            "",
            f"each pair is visited {f['objective.visits_per_pair']:.3g} times; between visits its normalizer is up to "
            f"{f['objective.steps_between_visits']:,.0f} steps old ({pairs_over_batch})",
        )
    else:
        yield "", f"a batch is 1 of {f['plan.batches_per_epoch']:,.1f} parts of the data ({pairs_over_batch})"
    if "objective.rho" in f.figures:
        yield (
            "",
            f"rho {f['objective.rho']:g}; above {f['objective.largest_useful_rho']:.3g} the temperature only falls",
        )


def _room_lines(f: Findings) -> Iterator[Line]:
    parts = ("towers", "activation", "objective", "loading")
    named = {"towers": "weights, gradients, AdamW", "activation": "activations"}
    text = ", ".join(f"{named.get(part, part)} {byte_size(f[f'memory.{part}_bytes'])}" for part in parts)
    available = f["memory.available_bytes"]
    there = f" of {byte_size(available)} there" if available else ""
    yield (
        "memory",
        f"about {byte_size(f['memory.total_bytes'])} per process{there} ({f['memory.device']}), the libraries aside",
    )
    yield "", text
    yield (
        "disk",
        f"{byte_size(f['disk.checkpoint_bytes'])} per checkpoint, {byte_size(f['disk.needed_bytes'])} in all of "
        f"{byte_size(f['disk.free_bytes'])} free",
    )


def _image(f: Findings) -> str:
    return f"{f['model.image_width']} x {f['model.image_height']}"


def _wrapped(heading: str, text: str, width: int) -> str:
    """Captions and file names are anybody's: what is not printable, such as a terminal's commands, is not printed."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    return textwrap.fill(
        re.sub(UNIT, "\\1\u00a0", printable),  # a number stays with its unit
        width,
        initial_indent=f"{heading:<{HEADING}}",
        subsequent_indent=" " * HEADING,
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\u00a0", " ")


def _verdict(findings: Findings) -> str:
    if findings.ready:
        return "ready: training would start"
    return f"not ready: training would fail ({plural(len(findings.problems), 'problem')})"
