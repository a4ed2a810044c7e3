"""The paper's network: prototypes that stand in for every candidate of the data set (Eq. 10 and 11).

Each rank holds a block of the slots and sees all anchors: a prediction exchanges one number per anchor, the log-sum-exp
over the block. They learn by closed form, without a graph: with q_ik = exp(cos_ik / tau - log sum_k exp(cos_ik / tau)),
d log_g_i / d p_k = q_ik x_i / tau for the unit prototype p_k, and d log_g_i / d x_i = sum_k q_ik p_k / tau.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from neuclip.distributed.collectives import gather_values, scatter_sum, sum_over_ranks, world_size
from neuclip.objectives.formulas import gradient_only
from neuclip.objectives.pairs import LOWEST, NOBODY, Pairs, gather_sides, strip_height
from neuclip.objectives.state import ShardedRows, adagrad_step, adam_step

Loss = Callable[[Tensor, Tensor], Tensor]  # of each anchor: its target and its log_g, (2, c), (2, c) -> (2, c)


class Prototypes(ShardedRows):
    """Slot k holds one pair: its text is a prototype for images (side 0), its image one for texts (side 1).

    The cosine divides by a row's length, so rows are free to grow.

    Args:
        size, embed_dim: m and d.
        restart_every: steps between restarts; 0: only at the start.
        rolling: each step replaces the oldest slots with its batch instead, and the optimizer forgets them.
        masks: whether slots of an anchor's own sample, and of its own caption, are no candidates of it.
        rate, adam: AdaGrad's learning rate, or Adam's.
    """

    rows: Tensor  # (2, share of m, d)
    owners: Tensor  # (share of m, 2) the sample and the caption that a slot was written from
    ring: Tensor  # (3,) the next slot to write; steps since the restart began; and `active`, how many were ever
    # written: they fill from the front

    def __init__(
        self,
        size: int,
        embed_dim: int,
        *,
        restart_every: int,
        rolling: bool,
        masks: tuple[bool, bool],
        rate: float,
        adam: bool,
    ):
        super().__init__(size)
        self.restart_every, self.rolling, self.masks = restart_every, rolling, masks
        self.rate, self.adam = rate, adam
        self.optimizer_state = ("first", "second", "steps") if adam else ("sums",)
        self.add_rows("rows", (2, -1, embed_dim))
        self.add_rows("owners", (-1, 2), fill=NOBODY)
        for name in self.optimizer_state:
            self.add_rows(name, (2, -1, 1 if name == "steps" else embed_dim))
        self.register_buffer("ring", torch.zeros(3, dtype=torch.int64))
        self.most = 0  # as many slots as can have been written: what the host knows of `active` without asking

    @property
    def ready(self) -> bool:
        return self.most > 0

    @torch.no_grad()
    def restart(self, pairs: Pairs) -> None:
        """Algorithm 1, lines 3-4: which slots this step renews, a ring, and from which rows of the batch.

        *periodic*: one batch cannot fill more slots than it has rows, so a restart with m > B goes on over the next
        steps; slots that are not yet overwritten keep their trained value, and a restart that falls due then waits.
        *rolling*: each step replaces the oldest slots with its batch, so the prototypes are a queue.

        A batch without any sound pair moves nothing. Only the device knows of it, so the ring is there.
        """
        moves = pairs.sound.any()
        written, age, active = self.ring
        if not self.rolling:
            due = moves & (written == self.size) & (age >= (self.restart_every or math.inf))
            written, age = written.masked_fill(due, 0), age.masked_fill(due, 0)
        room = self.size if self.rolling else self.size - written
        count = torch.where(moves, room, 0).clamp(max=pairs.batch)
        self._write(written, count, pairs)
        end = written + count
        ring = [end % self.size if self.rolling else end, age + moves, (active + count).clamp(max=self.size)]
        self.ring = torch.stack(ring)  # not in place: a state that was saved keeps its own
        self.most = min(self.most + pairs.batch, self.size)

    def _write(self, start: Tensor, count: Tensor, pairs: Pairs) -> None:
        """Renew `count` slots of the ring, from slot `start` on: of this rank's as many as a batch can renew are looked
        at, from the first one on."""
        share = len(self.share)
        if not share:
            return
        first = (start - self.share.start).clamp(0, share)
        slots = (first + torch.arange(min(pairs.batch, share), device=self.rows.device)) % share
        place = (slots + self.share.start - start) % self.size  # in the ring
        renewed = (place < count)[:, None]
        # Evenly spaced rows of the batch: every rank has its share. Sound pairs stand in for those that are not.
        row = (place * pairs.batch // count.clamp(min=1)).clamp(max=pairs.batch - 1)
        row = (~pairs.sound).int().argsort(stable=True)[row * pairs.sound.sum() // pairs.batch]
        owners = self.owners[:, : len(pairs.keys)]
        owners[slots] = torch.where(renewed, pairs.keys[:, row].T, owners[slots])
        self.rows[:, slots] = torch.where(renewed, pairs.all_features[:, row].flip(0), self.rows[:, slots])
        for name in self.optimizer_state if self.rolling else ():
            state = getattr(self, name)
            state[:, slots] = state[:, slots].masked_fill(renewed, 0)

    @torch.no_grad()
    def learn(self, pairs: Pairs, target: Tensor, loss: Loss, tau: Tensor, *, steps: int) -> None:  # target (2, b)
        """Algorithm 1, lines 7 and 8, `steps` times: the mean over anchors of `loss` falls."""
        target, rows = gather_sides(target), self.rows[:, : self._active]
        state = [getattr(self, name)[:, : self._active] for name in self.optimizer_state]
        step = partial(adam_step, sound=pairs.sound.any().to(rows.dtype)) if self.adam else adagrad_step
        gradient, buffer = torch.empty_like(rows), self._buffer(pairs)
        for _ in range(steps):
            lengths, unit = self._unit_rows()
            for anchors, weight, scale, log_g in self._visit(pairs, tau, unit, buffer):
                with torch.enable_grad():
                    log_g.requires_grad_()
                    (slope,) = torch.autograd.grad(loss(target[:, anchors], log_g).sum() / pairs.batch, log_g)
                factor = (slope * scale / tau)[..., None]
                for side in (0, 1):
                    push = factor[side] * pairs.all_features[side, anchors]
                    gradient[side].addmm_(weight[side].T, push, beta=1 if anchors.start else 0)
            # Through the division by the length: the component along a prototype has no effect.
            gradient.addcmul_(unit, torch.linalg.vecdot(gradient, unit)[..., None], value=-1).div_(lengths)
            for side in (0, 1):
                step(rows[side], gradient[side], self.rate, *(block[side] for block in state))

    def log_g(self, pairs: Pairs, tau: Tensor) -> Tensor:  # (2, b) with graph in features and tau
        """Eq. 10 and 11 without eps: what the prototypes say of this rank's anchors."""
        sides = (0, 1) if torch.is_grad_enabled() else ()
        value, mean = tau.new_empty(2, pairs.batch), torch.empty_like(pairs.all_features[: len(sides)])
        with torch.no_grad():
            _, unit = self._unit_rows()
            for anchors, weight, scale, log_g in self._visit(pairs, tau, unit, self._buffer(pairs)):
                value[:, anchors] = log_g
                for side in sides:  # the mean prototype under q, its part of this rank
                    torch.mm(weight[side], unit[side], out=mean[side, anchors]).mul_(scale[side, :, None])
        if not sides:
            return value[:, pairs.local]
        mean = scatter_sum(mean.transpose(0, 1)).transpose(0, 1)  # (2, b, d)
        slope = ((pairs.features * mean).sum(dim=2) - pairs.positive) / tau
        return value[:, pairs.local] + gradient_only(slope)

    @property
    def _active(self) -> int:
        """This rank's slots that can have been written."""
        return min(max(0, self.most - self.share.start), len(self.share))

    def _unit_rows(self) -> tuple[Tensor, Tensor]:
        rows = self.rows[:, : self._active]
        lengths = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        lengths.masked_fill_(lengths == 0, 1.0)  # a slot that was not written after all
        return lengths, rows / lengths

    def _buffer(self, pairs: Pairs) -> Tensor:
        """Memory for `_visit`: fresh pages would cost as much as the exponentials in them."""
        width = -(-self.size // world_size())  # the same on every rank, so that all have the same strips
        return self.rows.new_empty(2, strip_height(pairs.batch, 2 * width, self.rows.device), self._active)

    def _visit(
        self, pairs: Pairs, tau: Tensor, unit: Tensor, buffer: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Some anchors of each side at a time: their place, weight (2, c, slots) and scale (2, c), which multiplied are
        q over this rank's slots, and log_g (2, c) over those of all ranks."""
        offset, active = pairs.all_positive / tau, self.ring[2]
        log_count = active.clamp(min=1).to(unit.dtype).log()
        slots = torch.arange(self._active, device=unit.device) + self.share.start
        unwritten = unit.new_zeros(self._active).masked_fill_(slots >= active, LOWEST)
        height = buffer.shape[1]
        for start in range(0, pairs.batch, height):
            anchors = slice(start, min(start + height, pairs.batch))
            weight = buffer[:, : anchors.stop - start]
            for side in (0, 1):
                torch.addmm(unwritten, pairs.all_features[side, anchors] / tau, unit[side].T, out=weight[side])
            if any(self.masks):
                masked = self._masked(pairs.keys[:, anchors])
                weight.masked_fill_(masked, LOWEST)
                log_count = (active - sum_over_ranks(masked.sum(dim=1))).clamp(min=1).to(unit.dtype).log()
            peak = weight.amax(dim=2) if weight.numel() else weight.new_full(weight.shape[:2], LOWEST)
            log_sum = over_ranks(weight.sub_(peak[..., None]).exp_().sum(dim=2).log() + peak)
            yield anchors, weight, torch.exp(peak - log_sum), log_sum - offset[anchors] - log_count

    def _masked(self, keys: Tensor) -> Tensor:  # (k, c) -> (c, slots)
        masked = torch.zeros((), dtype=torch.bool, device=keys.device)
        for key, owner, mask in zip(keys, self.owners[: self._active].T, self.masks, strict=False):
            masked = masked | (key[:, None] == owner) if mask else masked
        return masked

    def get_extra_state(self) -> dict[str, int]:
        return {"most": self.most}

    def set_extra_state(self, state: Any) -> None:
        self.most = state["most"]


def over_ranks(log_sum: Tensor) -> Tensor:  # (2, c)
    """Every rank adds the same numbers in the same order: no drift between them."""
    return torch.logsumexp(gather_values(log_sum[None]), dim=0) if world_size() > 1 else log_sum
