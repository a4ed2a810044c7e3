"""What the cut into shards means for a run: for local data nothing, for remote data what is mixed, kept and fetched."""

from __future__ import annotations

from neuclip.data.order import SHARDS_TOGETHER
from neuclip.data.source import Source
from neuclip.data.tar.cache import largest_shards
from neuclip.doctor.findings import Findings


def note_shards(findings: Findings, source: Source) -> None:
    """Nothing for data without shards."""
    facts = [facts for part in source.parts if (facts := part.shard_facts()) is not None]
    if not facts:
        return
    pairs = [samples for one in facts for samples in one.samples]
    findings.note("shards", number=len(pairs), smallest=min(pairs), largest=max(pairs))
    remote = [one for one in facts if one.disk_bytes]
    if not remote:
        return
    everything, allowed = sum(sum(one.disk_bytes) for one in remote), remote[0].cache_size
    kept = [size for one in remote for size in largest_shards(one, SHARDS_TOGETHER)]
    findings.note(
        "shards",
        mixed_at_a_time=SHARDS_TOGETHER,
        kept=len(kept),
        kept_bytes=sum(kept),
        cache_bytes=allowed,
        fetched_bytes=everything,  # by each machine, in an epoch that finds none of them
        fetched_once=everything <= allowed,
        indexes_beside=all(part.has_remote_indexes() for part in source.parts if part.fetches),
    )
