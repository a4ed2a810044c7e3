"""The findings on one screen: a heading and a few aligned lines for each part, then what to do about it."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator

from neuclip.doctor.findings import Findings
from neuclip.formatting import byte_size, percent, plural

HEADING = 12  # columns
UNIT = r"(\d) (?=(?:[kMG]B|times?|steps?|workers?|pairs)\b|%)"
Line = tuple[str, str]  # heading or nothing, text


def page_text(findings: Findings, width: int) -> str:
    """All parts, wrapped to `width`; only captions are cut."""
    lines = []
    if "memory.total_bytes" in findings.figures:  # else the data could not be examined
        lines = [_wrapped(heading, text, width) for heading, text in _lines(findings, width)]
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
    yield from _shard_lines(f)
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


def _shard_lines(f: Findings) -> Iterator[Line]:
    if "shards.number" not in f.figures:
        return
    smallest, largest = f["shards.smallest"], f["shards.largest"]
    each = f"{largest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    shards = f"{plural(f['shards.number'], 'shard')} of {each} pairs"
    if "shards.kept_bytes" not in f.figures:
        yield "", f"{shards}; all pairs are shuffled, the order does not depend on the shards"
        return
    yield (
        "",
        f"{shards}, mixed {f['shards.mixed_at_a_time']} at a time; up to {f['shards.kept']} lie in the cache: "
        f"{byte_size(f['shards.kept_bytes'])} of data.cache_size {byte_size(f['shards.cache_bytes'])}",
    )
    often = "once: all of it fits into the cache" if f["shards.fetched_once"] else "in every epoch"
    beside = "lie" if f["shards.indexes_beside"] else "do not lie"
    yield (
        "",
        f"each machine fetches {byte_size(f['shards.fetched_bytes'])} {often}; indexes {beside} beside the shards",
    )


def _quality_lines(f: Findings) -> Iterator[Line]:
    if "images.modes" in f.figures:
        sides = [f"{_span(f, 'images', side)} {word}" for side, word in (("width", "wide"), ("height", "high"))]
        modes = ", ".join(
            f"{mode} {percent(count / sum(f['images.modes'].values()))}" for mode, count in f["images.modes"].items()
        )
        yield "images", f"{sides[0]}, {sides[1]}; {modes}; {byte_size(f['images.mean_bytes'])} each"
        yield "", f"{percent(f['images.small_share'])} smaller than the model's {_image(f)}"
    heading = "captions"
    if "captions.median_tokens" in f.figures:
        cut = percent(f["captions.cut_off_share"])
        yield (
            heading,
            f"{_span(f, 'captions', 'tokens')} tokens; {cut} are cut off at the model's {f['captions.context_tokens']}",
        )
        heading = ""
    yield heading, _equal(f)
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
    yield from _reading_lines(f)
    yield "warm-up", f"{plural(f['plan.warmup_steps'], 'step')} ({percent(f['plan.warmup_share'])})"
    moves = {"no": ", constant", "per sample": ", one per sample"}.get(
        f["temperature.learned"], f", can fall to {f['temperature.lowest_in_reach'] or 0:.3g} in this run"
    )
    yield (
        "temperature",
        f"starts at {f['temperature.initial']:g}{moves} (range {f['temperature.minimum']:g} to "
        f"{f['temperature.maximum']:g})",
    )


def _reading_lines(f: Findings) -> Iterator[Line]:
    """Who reads what, and how fast."""
    ranks, workers, local = f["plan.ranks"], f["plan.workers_per_rank"], f["plan.batch_per_rank"]
    chunks = "" if f["plan.micro_batch"] == local else f", {f['plan.micro_batch']:,} at a time"
    readers = {0: "no workers", 1: "1 worker"}.get(workers, f"{workers} workers that read the steps in turn")
    samples = f"{f['plan.samples_per_rank']:,} samples"
    yield "", f"{_processes(ranks)}: {local:,} pairs a step{chunks} and {samples} each, {readers}"
    if rate := f["loading.pairs_per_second_and_worker"]:
        most = rate * min(max(1, workers), f["loading.cores"])
        more = plural(math.ceil(1000 / rate), "worker")
        yield (
            "reading",
            f"a worker reads and decodes {rate:,.0f} pairs a second here, transforms aside: a process gets "
            f"{most:,.0f} at most, and each further 1,000 need {more}",
        )


def _processes(ranks: int) -> str:
    return "1 process" if ranks == 1 else f"{ranks:,} processes"


def _objective_lines(f: Findings) -> Iterator[Line]:
    yield (
        "objective",
        f"{f['objective.name']}; the first loss is {f['objective.first_loss']:.2g} where all pairs look alike, with "
        f"untrained towers {f['objective.first_loss_from']:.2g} to {f['objective.first_loss_to']:.2g}",
    )
    yield (
        "n/B",
        f"{f['plan.batches_per_epoch']:,.1f}; in FastCLIP a pair's average is renewed once per epoch and gets "
        f"{f['fastclip.steps_between_visits']:,.0f} steps old; {f['fastclip.visits_per_pair']:.3g} visits in this run",
    )
    every, defaults = f["neuclip.steps_between_renewals"], "" if f["objective.has_prototypes"] else " by default"
    renewed = f"are renewed every {every:,} steps (T_r), {plural(f['neuclip.renewals'], 'time')}" if every else "stay"
    yield (
        "",
        f"in NeuCLIP m = {f['neuclip.prototypes']:,} prototypes{defaults} stand for n = {f['data.pairs']:,} "
        f"candidates; m/B = {f['neuclip.prototypes_per_batch']:.3g} batches fill them, and they {renewed}",
    )
    if "objective.rho" in f.figures:
        yield (
            "",
            f"rho {f['objective.rho']:g}; above {f['objective.largest_useful_rho']:.3g} the temperature only falls",
        )


def _room_lines(f: Findings) -> Iterator[Line]:
    parts = ("libraries", "towers", "activation", "objective", "loading")
    named = {"towers": "weights, gradients and AdamW", "activation": "activations"}
    sizes = {named.get(part, part): f[f"memory.{part}_bytes"] for part in parts}
    free, ranks = f["memory.available_bytes"], f["plan.ranks"]
    there = f" of {byte_size(free)} free" if free else ""
    together = (
        f"; {byte_size(f['memory.together_bytes'])} if all {ranks} are on this machine"
        if ranks > 1 and f["memory.together_bytes"]
        else ""
    )
    yield (
        "memory",
        f"about {byte_size(f['memory.total_bytes'])} per process{there} ({f['memory.device']}){together}",
    )
    yield "", ", ".join(f"{name} {byte_size(size)}" for name, size in sizes.items() if size)
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
