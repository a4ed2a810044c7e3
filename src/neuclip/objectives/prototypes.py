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

from neuclip.distributed.collectives import gather_shares, gather_values, scatter_sum, sum_over_ranks, world_size
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
        rolling: each step replaces the oldest slots with its batch instead.
        reset: the optimizer forgets the slots that are overwritten.
        masks: whether slots of an anchor's own sample, and of its own caption, are no candidates of it.
        rate, adam: AdaGrad's learning rate, or Adam's.
    """

    rows: Tensor  # (2, share of m, d)
    owners: Tensor  # (share of m, 2) the sample and the caption that a slot was written from

    def __init__(
        self,
        size: int,
        embed_dim: int,
        *,
        restart_every: int,
        rolling: bool,
        reset: bool,
        masks: tuple[bool, bool],
        rate: float,
        adam: bool,
    ):
        super().__init__(size)
        self.restart_every, self.rolling, self.reset, self.masks = restart_every, rolling, reset or rolling, masks
        self.rate, self.adam = rate, adam
        self.optimizer_state = ("first", "second", "steps") if adam else ("sums",)
        self.add_rows("rows", (2, -1, embed_dim))
        self.add_rows("owners", (-1, 2), fill=NOBODY)
        for name in self.optimizer_state:
            self.add_rows(name, (2, -1, 1 if name == "steps" else embed_dim))
        self.written = 0  # slots since the restart began; of a rolling one the next slot
        self.age = 0  # steps since the restart began
        self.idle = 0  # steps since slots were last written
        self.active = 0  # slots that were ever written; they fill from the front

    @property
    def ready(self) -> bool:
        return self.active > 0

    @torch.no_grad()
    def restart(self, pairs: Pairs) -> None:
        """Algorithm 1, lines 3-4: which slots this step renews, a ring, and from which rows of the batch.

        *periodic*: one batch cannot fill more slots than it has rows, so a restart with m > B goes on over the next
        steps; slots that are not yet overwritten keep their trained value, and a restart that falls due then waits.
        *rolling*: each step replaces the oldest slots with its batch, so the prototypes are a queue.
        """
        size = self.size
        if not self.rolling and self.written == size and 0 < self.restart_every <= self.age:
            self.written = self.age = 0
        start, count = self.written, min(pairs.batch, size if self.rolling else size - self.written)
        self.written = (start + count) % size if self.rolling else start + count
        self.age = 0 if self.rolling else self.age + 1
        self.idle = 0 if count else self.idle + 1
        self.active = min(self.active + count, size)
        for turn in (0, size):  # the ring may close within a batch
            slots = range(max(start - turn, self.share.start), min(start + count - turn, self.share.stop))
            if slots:
                place = torch.arange(slots.start, slots.stop, device=self.rows.device) + (turn - start)
                self._write(slots, place * pairs.batch // count, pairs)  # evenly spaced: every rank has its share

    def _write(self, slots: range, rows: Tensor, pairs: Pairs) -> None:
        local = slice(slots.start - self.share.start, slots.stop - self.share.start)
        # Sound pairs stand in for those that are not; where there are none, slots stay as they are.
        sound_first = (~pairs.sound).int().argsort(stable=True)
        rows = sound_first[rows * pairs.sound.sum() // pairs.batch]
        sound, owners = pairs.sound[rows, None], self.owners[local, : len(pairs.keys)]
        self.rows[:, local] = torch.where(sound, pairs.all_features[:, rows].flip(0), self.rows[:, local])
        owners.copy_(torch.where(sound, pairs.keys[:, rows].T, owners))
        for name in self.optimizer_state if self.reset else ():
            getattr(self, name)[:, local].masked_fill_(sound, 0)

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
        """This rank's slots that were ever written."""
        return min(max(0, self.active - self.share.start), len(self.share))

    def _unit_rows(self) -> tuple[Tensor, Tensor]:
        rows = self.rows[:, : self._active]
        lengths = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        lengths.masked_fill_(lengths == 0, 1.0)  # a slot that no sound pair has filled yet: no direction
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
        offset, log_count = pairs.all_positive / tau, tau.new_full((), math.log(self.active))
        height = buffer.shape[1]
        for start in range(0, pairs.batch, height):
            anchors = slice(start, min(start + height, pairs.batch))
            weight = buffer[:, : anchors.stop - start]
            for side in (0, 1):
                torch.mm(pairs.all_features[side, anchors] / tau, unit[side].T, out=weight[side])
            if any(self.masks):
                masked = self._masked(pairs.keys[:, anchors])
                weight.masked_fill_(masked, LOWEST)
                log_count = (self.active - sum_over_ranks(masked.sum(dim=1))).clamp(min=1).to(unit.dtype).log()
            peak = weight.amax(dim=2) if weight.numel() else weight.new_full(weight.shape[:2], LOWEST)
            log_sum = over_ranks(weight.sub_(peak[..., None]).exp_().sum(dim=2).log() + peak)
            yield anchors, weight, torch.exp(peak - log_sum), log_sum - offset[anchors] - log_count

    def _masked(self, keys: Tensor) -> Tensor:  # (k, c) -> (c, slots)
        masked = torch.zeros((), dtype=torch.bool, device=keys.device)
        for key, owner, mask in zip(keys, self.owners[: self._active].T, self.masks, strict=False):
            masked = masked | (key[:, None] == owner) if mask else masked
        return masked

    def all_owners(self) -> Tensor:  # (m,)
        """Collective. The sample in each slot; negative where it has no number."""
        return gather_shares(self.owners[:, 0].contiguous(), self.size)

    def get_extra_state(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("written", "age", "idle", "active")}

    def set_extra_state(self, state: Any) -> None:
        self.written, self.age, self.idle, self.active = (state[key] for key in ("written", "age", "idle", "active"))


def over_ranks(log_sum: Tensor) -> Tensor:  # (2, c)
    """Every rank adds the same numbers in the same order: no drift between them."""
    return torch.logsumexp(gather_values(log_sum[None]), dim=0) if world_size() > 1 else log_sum
