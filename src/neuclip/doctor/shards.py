"""What the cut into shards means for a run: of local data nothing, of remote data what is mixed, kept and fetched."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuclip.data.locations import INDEX_SUFFIX
from neuclip.data.mixture import Mixture
from neuclip.data.shard_order import room_for
from neuclip.data.source import Source
from neuclip.data.tar.remote import Watch, file_system, retry
from neuclip.data.tar.remote_source import SHARDS_TOGETHER, RemoteTarSource
from neuclip.data.tar.source import TarSource
from neuclip.doctor.findings import Findings
from neuclip.errors import RunFailed, UserError


def note_shards(findings: Findings, source: Source) -> None:
    """Nothing for data without shards."""
    parts = [part for part in getattr(source, "sources", (source,)) if isinstance(part, TarSource)]
    if not parts:
        return
    pairs = np.concatenate([np.diff(part.joined.ends, prepend=0) for part in parts])
    findings.note("shards", number=len(pairs), smallest=int(pairs.min()), largest=int(pairs.max()))
    remote = [part for part in parts if isinstance(part, RemoteTarSource)]
    if remote:
        _note_remote(findings, remote, mixture=isinstance(source, Mixture))


def _note_remote(findings: Findings, parts: list[RemoteTarSource], *, mixture: bool) -> None:
    sizes = [sorted((room_for(part, shard) for shard in range(len(part.remote))), reverse=True) for part in parts]
    everything, allowed = sum(map(sum, sizes)), parts[0].cache.limits.cache_size
    findings.note(
        "shards",
        mixed_at_a_time=SHARDS_TOGETHER,
        kept=sum(len(part[: 2 * SHARDS_TOGETHER]) for part in sizes),
        kept_bytes=sum(sum(part[: 2 * SHARDS_TOGETHER]) for part in sizes),
        cache_bytes=allowed,
        fetched_bytes=everything,  # by each machine, in an epoch that finds none of them
        fetched_once=everything <= allowed,
        indexes_beside=all(_indexes_beside(part) for part in parts),
    )


def _indexes_beside(source: RemoteTarSource) -> bool:
    """As far as the remote has told; where it was not asked, because the indexes are known here, the first is asked."""
    told = [shard.index_beside for shard in source.remote]
    if None not in told or not source.indexes_beside:
        return all(told)
    url = source.remote[0].url + INDEX_SUFFIX

    def ask(watch: Watch) -> Any:
        system, path = file_system(url, source.cache.limits)
        return system.exists(path)

    try:
        return "?" not in url and bool(retry(url, ask, source.cache.limits))
    except (UserError, RunFailed):
        return False
