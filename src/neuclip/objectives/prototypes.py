"""The paper's network: prototypes that represent all candidates of the data set (Eq. 10 and 11).

Each rank holds a block of the slots and sees all anchors: a prediction exchanges one number per anchor, the log-sum-exp
over the block. Gradients are closed forms, without a graph. For unit prototypes p_k:

    q_ik = exp(cos_ik / tau - log sum_k exp(cos_ik / tau))
    d log_g_i / d p_k = q_ik x_i / tau
    d log_g_i / d x_i = sum_k q_ik p_k / tau
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
from neuclip.objectives.pairs import LOWEST, NO_KEY, Pairs, gather_sides, strip_height
from neuclip.objectives.state import ShardedRows, adagrad_step, adam_step

Loss = Callable[[Tensor, Tensor], Tensor]  # target and log_g of each anchor, (2, c) and (2, c) -> loss (2, c)


class Prototypes(ShardedRows):
    """Slot k starts as one pair: its text is a prototype for images (side 0), its image is one for texts (side 1).

    Rows need no unit length, because the cosine divides by their length.

    Args:
        size, embed_dim: m and d.
        restart_every: steps between restarts; 0: only at the start.
        rolling: instead of restarts, each step replaces the oldest slots with its batch and resets their optimizer
            state.
        masks: whether to mask, for each anchor, the slots with its own sample, and those with its own caption.
        rate, adam: the learning rate, and whether the optimizer is Adam; otherwise it is AdaGrad.
    """

    rows: Tensor  # (2, share of m, d)
    owners: Tensor  # (share of m, 2) keys of the sample and of the caption that a slot was written from
    ring: Tensor  # (3,) the next slot to write; the steps since the restart began; and `active`, the number of slots
    # that were ever written, which are the first ones

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
        self.add_rows("owners", (-1, 2), fill=NO_KEY)
        for name in self.optimizer_state:
            self.add_rows(name, (2, -1, 1 if name == "steps" else embed_dim))
        self.register_buffer("ring", torch.zeros(3, dtype=torch.int64))
        self.most = 0  # an upper bound of `active` on the host: reading `active` would wait for the device

    @property
    def ready(self) -> bool:
        return self.most > 0

    @torch.no_grad()
    def restart(self, pairs: Pairs) -> None:
        """Algorithm 1, lines 3 and 4: reset prototypes from the batch. The slots are a ring.

        *periodic*: all slots are reset every `restart_every` steps. A batch can fill only as many slots as it has rows;
        if m > B, the restart continues over the next steps. Slots that wait keep their trained value, and the next
        restart waits until this one is complete.
        *rolling*: each step replaces the oldest slots with its batch; the prototypes are a queue.

        A batch without a sound pair changes nothing. Only the device knows of it: therefore `ring` is a tensor there.
        """
        has_pairs = pairs.sound.any()
        written, age, active = self.ring
        if not self.rolling:
            due = has_pairs & (written == self.size) & (age >= (self.restart_every or math.inf))
            written, age = written.masked_fill(due, 0), age.masked_fill(due, 0)
        to_write = self.size if self.rolling else self.size - written
        count = torch.where(has_pairs, to_write, 0).clamp(max=pairs.batch)
        self._write(written, count, pairs)
        end = written + count
        ring = [end % self.size if self.rolling else end, age + has_pairs, (active + count).clamp(max=self.size)]
        self.ring = torch.stack(ring)  # a new tensor: a saved state may refer to the old one
        self.most = min(self.most + pairs.batch, self.size)

    def _write(self, start: Tensor, count: Tensor, pairs: Pairs) -> None:
        """Renew `count` slots of the ring from slot `start` on. `count` is on the device, so each rank looks at as many
        of its slots as a batch can renew, and changes those that are among the `count`."""
        share = len(self.share)
        if not share:
            return
        first = (start - self.share.start).clamp(0, share)
        slots = (first + torch.arange(min(pairs.batch, share), device=self.rows.device)) % share
        offset = (slots + self.share.start - start) % self.size  # from `start`, in the ring
        renewed = (offset < count)[:, None]
        # Evenly spaced rows of the batch, so that pairs of every rank are used. Sound pairs replace unsound ones.
        row = (offset * pairs.batch // count.clamp(min=1)).clamp(max=pairs.batch - 1)
        row = (~pairs.sound).int().argsort(stable=True)[row * pairs.sound.sum() // pairs.batch]
        owners = self.owners[:, : len(pairs.keys)]
        owners[slots] = torch.where(renewed, pairs.keys[:, row].T, owners[slots])
        self.rows[:, slots] = torch.where(renewed, pairs.all_features[:, row].flip(0), self.rows[:, slots])
        for name in self.optimizer_state if self.rolling else ():
            state = getattr(self, name)
            state[:, slots] = state[:, slots].masked_fill(renewed, 0)

    @torch.no_grad()
    def learn(self, pairs: Pairs, target: Tensor, loss: Loss, tau: Tensor, *, steps: int) -> None:  # target (2, b)
        """Algorithm 1, lines 6 to 8: take `steps` gradient steps on the mean over anchors of `loss`."""
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
                    weighted = factor[side] * pairs.all_features[side, anchors]
                    gradient[side].addmm_(weight[side].T, weighted, beta=1 if anchors.start else 0)
            # The chain rule through the division by the length: the component along a prototype has no effect.
            gradient.addcmul_(unit, torch.linalg.vecdot(gradient, unit)[..., None], value=-1).div_(lengths)
            for side in (0, 1):
                step(rows[side], gradient[side], self.rate, *(block[side] for block in state))

    def log_g(self, pairs: Pairs, tau: Tensor) -> Tensor:  # (2, b) with graph in features and tau
        """The prediction for this rank's anchors: Eq. 10 and 11 without eps."""
        sides = (0, 1) if torch.is_grad_enabled() else ()
        value, mean = tau.new_empty(2, pairs.batch), torch.empty_like(pairs.all_features[: len(sides)])
        with torch.no_grad():
            _, unit = self._unit_rows()
            for anchors, weight, scale, log_g in self._visit(pairs, tau, unit, self._buffer(pairs)):
                value[:, anchors] = log_g
                for side in sides:  # this rank's part of the mean prototype under q
                    torch.mm(weight[side], unit[side], out=mean[side, anchors]).mul_(scale[side, :, None])
        if not sides:
            return value[:, pairs.local]
        mean = scatter_sum(mean.transpose(0, 1)).transpose(0, 1)  # (2, b, d)
        slope = ((pairs.features * mean).sum(dim=2) - pairs.positive) / tau
        return value[:, pairs.local] + gradient_only(slope)

    @property
    def _active(self) -> int:
        """The number of this rank's slots that may have been written."""
        return min(max(0, self.most - self.share.start), len(self.share))

    def _unit_rows(self) -> tuple[Tensor, Tensor]:
        rows = self.rows[:, : self._active]
        lengths = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        lengths.masked_fill_(lengths == 0, 1.0)  # slots that were not written
        return lengths, rows / lengths

    def _buffer(self, pairs: Pairs) -> Tensor:
        """Memory that `_visit` uses again: new pages would cost as much time as the exponentials."""
        width = -(-self.size // world_size())  # the same on every rank, so that all have the same strips
        return self.rows.new_empty(2, strip_height(pairs.batch, 2 * width, self.rows.device), self._active)

    def _visit(
        self, pairs: Pairs, tau: Tensor, unit: Tensor, buffer: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Iterate over strips of anchors: their slice, weight (2, c, slots) and scale (2, c), whose product is q over
        this rank's slots, and log_g (2, c) over the slots of all ranks."""
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
    """The log-sum-exp over ranks. Every rank adds the same numbers in the same order: ranks do not drift apart."""
    return torch.logsumexp(gather_values(log_sum[None]), dim=0) if world_size() > 1 else log_sum
