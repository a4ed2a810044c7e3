"""What the data holds: files, images, captions, and pairs that cannot be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from statistics import median

import numpy as np

from neuclip.data.faults import count_unindexed, describe_unindexed, refuse_bad_source, too_many
from neuclip.data.order import SHARDS_TOGETHER
from neuclip.data.source import BadSample, CaptionCounts, Source
from neuclip.doctor.findings import Findings
from neuclip.doctor.probe import SampleProbe
from neuclip.errors import RunFailed
from neuclip.formatting import percent, plural
from neuclip.models.facts import COUNTED, ModelFacts, token_counter
from neuclip.models.hub import NotDownloaded
from neuclip.secrets import without_queries
from neuclip.settings.sections import DataSettings, Settings

CAPTIONS_COMPARED = 20_000_000  # up to here all captions are compared; above it a sample
MANY_CUT_OFF = 0.05
FIT = 0.99  # of the captions, for which a model is named; a single one may be of any length
MANY_EQUAL = 0.01  # of a batch
MANY_SMALL = 0.5
PATCH = 32


def note_source(findings: Findings, source: Source, data: DataSettings) -> None:
    lost = count_unindexed(source)
    findings.note(
        "data",
        address=without_queries(data.train),
        name=source.name,
        kind=source.kind,
        pairs=len(source),
        index_faults=lost,
    )
    if source.shard_ends is not None:
        findings.note("shards", number=len(source.shard_ends), mixed_at_a_time=SHARDS_TOGETHER)
    try:
        refuse_bad_source(source, data.max_bad_share)
    except RunFailed as error:
        what, _, remedy = str(error).rpartition("; ")
        findings.fail(what, "training would not start", remedy)
        return
    if source.faults:
        findings.warn(
            f"{plural(lost, 'pair')} could not be indexed (at least)",
            describe_unindexed(source),
            "repair these files or download them again",
        )


def note_probe(findings: Findings, probe: SampleProbe, source: Source) -> None:
    shown = [{"id": one.id, "width": one.size[0], "height": one.size[1], "caption": one.caption} for one in probe.shown]
    several = sum(len(captions) > 1 for captions in probe.captions)
    chosen = "from one shard" if source.shard_ends is not None else "the first of the run"
    findings.note("sample", pairs=probe.read, share=probe.read / len(source), chosen=chosen, shown=shown[:3])
    findings.note("captions", several_share=several / max(1, len(probe.captions)))


def note_bad(findings: Findings, probe: SampleProbe, settings: Settings, pairs: int) -> None:
    """Judged as in a run (data/faults.py): the share may exceed the limit by what chance explains."""
    limit, share = settings.data.max_bad_share, probe.bad / probe.read
    # Data that was probed completely is read again in every epoch, and chance explains less and less.
    reads = settings.train.samples if probe.read == pairs else probe.read
    alone = probe.bad == probe.read or bool(probe.without_replacement)
    stops = alone or too_many(share * reads, reads, limit)
    findings.note(
        "bad", pairs=probe.bad, share=share, limit=limit, reasons=dict(probe.faults.most_common()), stops_run=stops
    )
    what = f"{percent(share)} of the probed pairs are bad"
    above = f"{what}, data.max_bad_share is {percent(limit)}"
    remedy = f"repair the data (first: {probe.first_fault})"
    allowed = f"{remedy}, or give --data.max_bad_share {min(1, share * 1.5):.2g}"
    if alone:
        where = f" for {probe.without_replacement}" if probe.without_replacement else ""
        findings.fail(what, f"no replacement found{where}, the run would stop", f"{remedy} or remove that part")
    elif stops:
        findings.fail(above, "the run would stop", allowed)
    elif share > limit:
        findings.warn(above, "the run may stop", allowed)
    elif probe.bad:
        findings.warn(
            what,
            "each is replaced by a neighbour, which is then seen more often",
            f"the run continues below data.max_bad_share {limit:g}; repair or remove them, first: {probe.first_fault}",
        )


def note_images(findings: Findings, probe: SampleProbe, model: ModelFacts) -> None:
    if not probe.sizes:
        return
    widths, heights = ([size[side] for size in probe.sizes] for side in (0, 1))
    needed = min(model.image_size)
    small = sum(min(size) < needed for size in probe.sizes) / len(probe.sizes)
    findings.note(
        "images",
        **{
            f"{name}_{side}": statistic(sides)
            for side, sides in (("width", widths), ("height", heights))
            for name, statistic in (("smallest", min), ("median", median), ("largest", max))
        },
        small_share=small,
        modes=dict(probe.modes.most_common()),
        mean_bytes=probe.image_bytes / len(probe.sizes),
    )
    # Rounded up to whole patches of most vision transformers.
    fitting = -(-round(median(min(size) for size in probe.sizes)) // PATCH) * PATCH
    if small > MANY_SMALL and fitting < needed:
        findings.warn(
            f"{percent(small)} of the images are smaller than the model's {needed} pixels",
            "they are upscaled, which costs time and adds no detail",
            f"give --model.image_size {fitting}, or a smaller model",
        )


def note_caption_lengths(findings: Findings, probe: SampleProbe, settings: Settings, model: ModelFacts) -> None:
    """In tokens, with start and end; of all captions of the probed pairs."""
    captions = list(chain.from_iterable(probe.captions))
    try:
        count = token_counter(settings.model.name, usual=model.usual_tokenizer)
    except NotDownloaded as error:
        findings.fail_with(error, "captions cannot be tokenized")
        return
    if count is None or not captions:
        return
    lengths = count(captions)
    cut = sum(length > model.context_length for length in lengths) / len(lengths)
    findings.note(
        "captions",
        smallest_tokens=min(lengths),
        median_tokens=median(lengths),
        largest_tokens=max(lengths),
        context_tokens=model.context_length,
        cut_off_share=cut,
    )
    if cut > MANY_CUT_OFF:
        fitting = sorted(lengths)[int(FIT * (len(lengths) - 1))]
        longest = f"{'at least ' if max(map(len, captions)) > COUNTED else ''}{max(lengths)}"
        findings.warn(
            f"{percent(cut)} of the captions are longer than the model's {model.context_length} tokens",
            f"their ends are cut off; {percent(FIT)} have up to {fitting} tokens, the longest has {longest}",
            f"give --model.context_length {-(-fitting // 8) * 8}, or shorten captions",
        )


def note_caption_counts(findings: Findings, source: Source, counts: CaptionCounts) -> None:
    """How many captions the samples have, and whether several samples have the same image."""
    keys = source.image_keys()
    findings.note(
        "captions",
        number=counts.captions,
        fewest=counts.fewest,
        most=counts.most,
        missing=counts.without,
        different_images=None if keys is None else len(np.unique(keys)),
    )


def note_equal_captions(findings: Findings, source: Source, probe: SampleProbe, settings: Settings) -> None:
    """How many pairs share their caption, in the data and in a batch, where they are false negatives of each other."""
    batch = min(settings.train.batch_size, len(source))
    if len(source) <= CAPTIONS_COMPARED:
        facts = np.concatenate(list(source.caption_facts()))
        ids = np.flatnonzero(facts["captions"])
        _, first, counts = np.unique(facts["hash"][ids], return_index=True, return_counts=True)
        equal = int(counts[counts > 1].sum()) / len(source)
        in_batch = share_with_duplicate(counts.tolist(), len(source), batch)
        most = int(np.argmax(counts)) if len(counts) else -1
        commonest, times = (_caption(source, int(ids[first[most]])), int(counts[most])) if most >= 0 else ("", 0)
        findings.note("captions", equal_share=equal, commonest=commonest, commonest_count=times, counted=len(source))
    else:
        in_batch = estimate_share_with_duplicate([captions[0] for captions in probe.captions], batch)
        findings.note("captions", equal_share=None, commonest=None, commonest_count=None, counted=len(probe.captions))
    findings.note("captions", equal_in_batch_share=in_batch)
    if in_batch > MANY_EQUAL and not settings.objective.mask_duplicates:
        findings.warn(
            f"{percent(in_batch)} of a batch have the same caption as another pair of the batch",
            "they are false negatives of each other",
            "give --objective.mask_duplicates true",
        )


def _caption(source: Source, id: int) -> str:
    """The first of a sample; of remote data none, which would be downloaded for it."""
    try:
        return source[id].captions[0] if source.shard_ends is None else ""
    except BadSample:
        return ""


def share_with_duplicate(counts: Sequence[int], pairs: int, batch: int) -> float:
    """Expected share of a batch whose caption another pair of the batch has too; `counts`: how often each occurs.

    >>> share_with_duplicate([2, 1, 1], pairs=4, batch=4)
    0.5
    """
    # A pair with c - 1 duplicates has none of them in its batch with probability (1 - (c - 1)/(n - 1))^(B - 1), about.
    alone = sum(
        count * (1 - (count - 1) / (pairs - 1)) ** (batch - 1) * times
        for count, times in Counter(counts).items()
        if count > 1
    )
    return (sum(count for count in counts if count > 1) - alone) / pairs if pairs > 1 else 0.0


def estimate_share_with_duplicate(captions: Sequence[str], batch: int) -> float:
    """The same from a sample: over all its couples, how probably two pairs have the same caption."""
    couples = len(captions) * (len(captions) - 1) / 2
    equal = sum(count * (count - 1) / 2 for count in Counter(captions).values())
    return 1 - (1 - equal / couples) ** (batch - 1) if couples else 0.0
