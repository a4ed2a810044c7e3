"""The order of remote data: shards are shuffled, and a few at a time are mixed, so that a few are on the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from neuclip.data.order import GOLDEN, MASK, Order, key_of, mix
from neuclip.data.tar.gzip import is_packed
from neuclip.data.tar.index import BLOCK
from neuclip.data.tar.remote import RemoteShard
from neuclip.data.tar.remote_source import SHARDS_TOGETHER, RemoteTarSource
from neuclip.errors import UserError

if TYPE_CHECKING:
    from neuclip.data.source import Source

RECORD = 10_240  # bytes, of which tar writes whole ones


@dataclass(frozen=True)
class Group:
    """Shards that are mixed: their samples stand at positions start..start+size-1 of their epoch."""

    epoch: int
    number: int
    shards: np.ndarray
    start: int
    size: int


class ShardOrder(Order):
    """As Order, an endless shuffle with every id exactly once per epoch, but at any time from few shards.

    Each epoch shuffles the shards anew and cuts them into groups of at most `together`, as even as can be. The samples
    of a group are shuffled among themselves, and group follows group. It is a function of the sizes of the shards, the
    seed and the position; what it keeps is one number per shard.

    >>> ShardOrder(ends=[3, 5, 9], seed=0, together=2).ids(start=0, count=9)
    """

    def __init__(self, ends: Sequence[int] | np.ndarray, seed: int, together: int = SHARDS_TOGETHER):
        self.ends = np.asarray(ends, dtype=np.int64)
        super().__init__(int(self.ends[-1]), seed)
        self.sizes = np.diff(self.ends, prepend=0)
        groups = -(-len(self.ends) // together)
        self.cuts = np.arange(groups + 1) * len(self.ends) // groups
        self.shard_order = Order(len(self.ends), seed)
        cut = hashlib.sha256(self.ends.astype("<i8").tobytes()).hexdigest()[:8]
        self.about = f"{len(self.ends):,} shards ({cut}), {together} mixed at a time"
        self._epoch = (-1, np.zeros(0, np.int64), np.zeros(0, np.int64))

    def ids(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: the ids at positions start..start+count-1; the window may straddle groups and epochs."""
        found = [np.zeros(0, np.int64)]
        position, end = start, start + count
        while position < end:
            group = self.group_at(position)
            first = position - group.epoch * self.size - group.start
            taken = min(end - position, group.size - first)
            found.append(self._ids_of(group, first, taken))
            position += taken
        return np.concatenate(found)

    def group_at(self, position: int) -> Group:
        epoch = position // self.size
        shards, ends = self._shards_and_ends(epoch)
        number = int(np.searchsorted(ends, position - epoch * self.size, side="right"))
        start = int(ends[number - 1]) if number else 0
        chosen = shards[self.cuts[number] : self.cuts[number + 1]]
        return Group(epoch, number, chosen, start, int(ends[number]) - start)

    def _shards_and_ends(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order of shards, and where each group ends."""
        if self._epoch[0] != epoch:
            shards = self.shard_order.ids(epoch * len(self.ends), len(self.ends))
            self._epoch = (epoch, shards, np.cumsum(self.sizes[shards])[self.cuts[1:] - 1])
        return self._epoch[1:]

    def _ids_of(self, group: Group, first: int, count: int) -> np.ndarray:
        seed = int(mix(key_of(self.seed, np.array([group.epoch])) + np.uint64(GOLDEN * (group.number + 1) & MASK))[0])
        places = Order(group.size, seed).ids(first, count)
        ends = np.cumsum(self.sizes[group.shards])
        which = np.searchsorted(ends, places, side="right")
        # The place in the group, minus the group's samples before this shard, plus the ids before it.
        return places - ends[which] + self.ends[group.shards[which]]


class FetchingOrder(ShardOrder):
    """The order of a remote source. Who asks for ids is about to read them: their shards and those of the next group
    are then fetched in the background."""

    def __init__(self, source: RemoteTarSource, seed: int, together: int = SHARDS_TOGETHER):
        super().__init__(source.joined.ends, seed, together)
        self.source = source
        self.wanted: list[RemoteShard] = []  # of the group that was entered and the next
        self._entered = (-1, -1)

    def ids(self, start: int, count: int) -> np.ndarray:
        if self.enters(start):
            self.source.cache.want(self.wanted)
        return super().ids(start, count)

    def enters(self, position: int) -> bool:
        """Whether another group is read from here on than was before; `wanted` then is of that group."""
        here = self.group_at(position)
        if self._entered == (here.epoch, here.number):
            return False
        self._entered = (here.epoch, here.number)
        after = self.group_at(here.epoch * self.size + here.start + here.size)
        wanted = dict.fromkeys([*here.shards.tolist(), *after.shards.tolist()])
        self.wanted = [self.source.remote[shard] for shard in wanted]
        return True


def check_cache(sources: Sequence[Source], together: int) -> None:
    """Of each remote source two groups must fit, the one that is read and the next, else shards are fetched over and
    over."""
    remote = [source for source in sources if isinstance(source, RemoteTarSource)]
    sizes = [sorted((room_for(part, shard) for shard in range(len(part.remote))), reverse=True) for part in remote]
    largest = [size for part_sizes in sizes for size in part_sizes[: 2 * together]]
    if remote and sum(largest) > (allowed := remote[0].cache.limits.cache_size):
        raise UserError(
            f"data.cache_size {allowed:,} is too small: {len(largest)} shards of "
            f"{' and '.join(part.name for part in remote)} must be on the disk at a time; "
            f"give --data.cache_size {sum(largest)} or more"
        )


def room_for(source: RemoteTarSource, shard: int) -> int:
    """Bytes of a shard on the disk. Of one that is packed there, or whose size the remote does not tell, the index says
    where the last sample ends; what else may lie behind it is not counted."""
    remote = source.remote[shard]
    if remote.size >= 0 and not is_packed(remote):
        return remote.size
    ends = source.joined.ends
    rows = source.joined.rows[ends[shard - 1] if shard else 0 : ends[shard]]
    used = [
        int((rows[f"{member}_block"].astype(np.int64) * BLOCK + rows[f"{member}_size"]).max(initial=0))
        for member in ("image", "caption")
    ]
    return (max(used) + 2 * BLOCK + RECORD - 1) // RECORD * RECORD  # two empty blocks end a tar
