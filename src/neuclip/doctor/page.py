"""The findings on one screen: a heading and a few aligned lines per topic, then warnings and problems."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace

from neuclip.data.source import CaptionCounts
from neuclip.doctor.findings import Findings
from neuclip.formatting import byte_size, percent, plural

HEADING = 12  # columns
UNIT = r"(\d) (?=(?:[kMG]B|times?|steps?|workers?|pairs|ranks?)\b|%)"
Line = tuple[str, str]  # heading or "", text


def page_text(findings: Findings, width: int) -> str:
    """All topics, wrapped to `width`; only captions are cut."""
    lines: list[Line] = []
    if "memory.total_bytes" in findings:  # otherwise the data could not be examined
        lines += [*data_lines(findings), *shard_lines(findings), *sample_lines(findings, width - HEADING)]
        lines += [*quality_lines(findings), *plan_lines(findings)]
        lines += [*objective_lines(findings), *resource_lines(findings)]
    text = [wrap(heading, text, width) for heading, text in lines]
    text += [wrap("warning", str(advice), width) for advice in findings.warnings]
    text += [wrap("problem", str(advice), width) for advice in findings.problems]
    problems = plural(len(findings.problems), "problem")
    text.append("ready: training would start" if findings.ready else f"not ready: training would fail ({problems})")
    return "".join(f"{line}\n" for line in text)


def data_lines(findings: Findings) -> Iterator[Line]:
    data = findings.section("data")
    yield "data", f"{data.address}: {plural(data.pairs, 'pair')} ({data.kind})"


def shard_lines(findings: Findings) -> Iterator[Line]:
    if "shards.number" not in findings:
        return
    shards = findings.section("shards")
    yield "", f"{plural(shards.number, 'shard')} to download, mixed {shards.mixed_at_a_time} at a time"


def sample_lines(findings: Findings, width: int) -> Iterator[Line]:
    sample = findings.section("sample")
    share = "all" if sample.share == 1 else f"{percent(sample.share)}, {sample.chosen}"
    yield "probed", f"{plural(sample.pairs, 'pair')}: {share}"
    for number, pair in enumerate(sample.shown):
        line = f"{pair['id']:>9}  {pair['width']:>5} x {pair['height']:<5}  {' '.join(pair['caption'].split())}"
        yield "" if number else "samples", line if len(line) <= width else f"{line[: width - 3]}..."
    if "sample.sheet" in findings:
        yield "", f"contact sheet: {sample.sheet}"


def quality_lines(findings: Findings) -> Iterator[Line]:
    images, captions, bad = (findings.section(name) for name in ("images", "captions", "bad"))
    if "images.modes" in findings:
        counted = sum(images.modes.values())
        modes = ", ".join(f"{mode} {percent(count / counted)}" for mode, count in images.modes.items())
        size = f"width {span(images, 'width')}, height {span(images, 'height')}"
        yield "images", f"{size}; {modes}; {byte_size(images.mean_bytes)} each"
        yield "", f"{percent(images.small_share)} smaller than the model's {image_size(findings)}"
    yield "captions", captions_text(findings)
    if captions.different_images not in (None, findings["data.pairs"]):
        rows = "rows of one image are separate samples in training, and one sample where recall is measured"
        yield "", f"{plural(captions.different_images, 'different image')}: {rows}"
    duplicates = f"{percent(captions.equal_in_batch_share)} of a batch have the same caption as another pair of it"
    if captions.equal_share is None:
        yield "", f"{duplicates} (estimated from {plural(captions.counted, 'caption')})"
    else:
        yield "", f"{percent(captions.equal_share)} of all pairs share their caption with another, {duplicates}"
        if captions.commonest_count > 1 and captions.commonest:
            yield "", f"most frequent: {captions.commonest!r}, {captions.commonest_count:,} times"
    if "captions.median_tokens" in findings:
        cut = f"{percent(captions.cut_off_share)} are cut off at the model's {captions.context_tokens}"
        yield "", f"{span(captions, 'tokens')} tokens; {cut}"
    for name, counts in findings["evaluation.captions"].items():
        yield "held out", f"{name}: {CaptionCounts(**counts)}"
    reasons = ", ".join(f"{count} x {reason}" for reason, count in bad.reasons.items()) or "none"
    yield "bad pairs", f"{reasons}; a run stops above {percent(bad.limit)}"


def captions_text(findings: Findings) -> str:
    captions = findings.section("captions")
    pairs = findings["data.pairs"]
    return str(CaptionCounts(pairs, captions.number, captions.fewest, captions.most, captions.missing))


def span(section: SimpleNamespace, name: str) -> str:
    """'32', or '24 to 48 (median 32)'."""
    low, middle, high = (getattr(section, f"{which}_{name}") for which in ("smallest", "median", "largest"))
    return f"{low}" if low == high else f"{low} to {high} (median {middle:g})"


def image_size(findings: Findings) -> str:
    return f"{findings['model.image_width']} x {findings['model.image_height']}"


def plan_lines(findings: Findings) -> Iterator[Line]:
    model, plan, tau = (findings.section(name) for name in ("model", "plan", "temperature"))
    size = f"{model.parameters / 1e6:.1f} M parameters, {image_size(findings)} pixels, {model.context_tokens} tokens"
    yield "model", f"{model.name}: {size}, {model.embed_dim} features"
    budget = f"{plural(plan.steps, 'step')} of {plural(plan.batch_size, 'pair')} = {plural(plan.samples, 'sample')}"
    yield "plan", f"{budget} = {plan.epochs:.3g} epochs of {plan.batches_per_epoch:,.1f} steps"
    chunks = "" if plan.micro_batch == plan.batch_per_rank else f", {plan.micro_batch:,} per forward pass"
    share = f"{plural(plan.batch_per_rank, 'pair')} per step{chunks}, {plural(plan.samples_per_rank, 'sample')}"
    yield "", f"{plural(plan.ranks, 'rank')}; per rank {share}, {plural(plan.workers_per_rank, 'worker')}"
    if rate := findings["loading.pairs_per_second_and_worker"]:
        most = rate * min(max(1, plan.workers_per_rank), findings["loading.cores"])
        more = plural(math.ceil(1000 / rate), "more worker")
        yield "reading", f"a worker reads and decodes {rate:,.0f} pairs per second here, without transforms"
        yield "", f"a rank gets at most {most:,.0f} per second; 1,000 more need {more}"
    yield "warm-up", f"{plural(plan.warmup_steps, 'step')} ({percent(plan.warmup_share)})"
    falls = f"can fall to {tau.lowest_in_reach or 0:.3g} in this run"
    moves = {"no": "constant", "per sample": "one per sample", "yes": falls}[tau.learned]
    yield "temperature", f"starts at {tau.initial:g}, {moves} (range {tau.minimum:g} to {tau.maximum:g})"


def objective_lines(findings: Findings) -> Iterator[Line]:
    objective, fastclip, neuclip = (findings.section(name) for name in ("objective", "fastclip", "neuclip"))
    yield "objective", f"{objective.name}; its state takes {byte_size(objective.state_bytes)}"
    visits = f"every {plural(fastclip.steps_between_visits, 'step')}, {fastclip.visits_per_pair:.3g}x in this run"
    yield "n/B", f"{findings['plan.batches_per_epoch']:,.1f}; FastCLIP updates the average of a pair {visits}"
    default = "" if objective.has_prototypes else " by default"
    number = (
        f"m = {plural(neuclip.prototypes, 'prototype')}{default} for n = {plural(findings['data.pairs'], 'candidate')}"
    )
    filled = f"filled by m/B = {neuclip.prototypes_per_batch:.3g} batches"
    every, times = neuclip.steps_between_renewals, plural(neuclip.renewals or 0, "time")
    renewed = f"replaced every {plural(every, 'step')} (T_r), {times}" if every else "never replaced"
    yield "", f"NeuCLIP has {number}, {filled} and {renewed}"


def resource_lines(findings: Findings) -> Iterator[Line]:
    memory, disk, ranks = findings.section("memory"), findings.section("disk"), findings["plan.ranks"]
    free = f" of {byte_size(memory.available_bytes)} free" if memory.available_bytes else ""
    together = ""
    if ranks > 1 and memory.together_bytes:
        together = f"; {byte_size(memory.together_bytes)} if all {ranks} ranks are on this machine"
    where = f"{memory.device}, {memory.precision}"
    yield "memory", f"about {byte_size(memory.total_bytes)} per rank{free} ({where}){together}"
    parts = {
        "libraries": memory.libraries_bytes,
        "weights, gradients and AdamW": memory.towers_bytes,
        "activations": memory.activation_bytes,
        "objective": memory.objective_bytes,
        "loading": memory.loading_bytes,
    }
    yield "", ", ".join(f"{name} {byte_size(size)}" for name, size in parts.items() if size)
    needed = f"{byte_size(disk.needed_bytes)} in total of {byte_size(disk.free_bytes)} free"
    yield "disk", f"{byte_size(disk.checkpoint_bytes)} per checkpoint, {needed}"


def wrap(heading: str, text: str, width: int) -> str:
    """Captions and file names may hold anything: unprintable characters, such as terminal commands, become '?'."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    return textwrap.fill(
        re.sub(UNIT, "\\1\u00a0", printable),  # a number stays with its unit
        width,
        initial_indent=f"{heading:<{HEADING}}",
        subsequent_indent=" " * HEADING,
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\u00a0", " ")
