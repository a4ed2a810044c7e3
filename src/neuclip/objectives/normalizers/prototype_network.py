"""The paper's network: two sets of prototypes, renewed from fresh features and refined on each batch."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from neuclip.distributed.collectives import gather_values, sum_over_ranks
from neuclip.objectives.normalizers.prototypes import Anchors, Prototypes, anchors_at
from neuclip.objectives.normalizers.row_optimizer import RowOptimizer
from neuclip.objectives.normalizers.sharded import ShardedRows
from neuclip.objectives.pairs import Both, Pairs
from neuclip.settings.objectives import NeuCLIPSettings

NO_OWNER = -1  # of a slot that was never written


class PrototypeNetwork(nn.Module):
    """Predicts log(eps + g) of both sides, and changes in two ways: `restart` and `learn`."""

    def __init__(self, embed_dim: int, settings: NeuCLIPSettings):
        super().__init__()
        self.eps, self.fit, self.inner_steps = settings.eps, settings.fit, settings.network_updates
        self.reset_at_restart = settings.reset_optimizer_at_restart or settings.restart == "rolling"
        restart_every = settings.restart_every if settings.update == "alternating" else 0
        self.schedule = RestartSchedule(settings.num_prototypes, settings.restart, restart_every)
        optimizer = RowOptimizer.of(settings)
        self.for_image = Prototypes(settings.num_prototypes, embed_dim, optimizer)
        self.for_text = Prototypes(settings.num_prototypes, embed_dim, optimizer)
        masks = settings.mask_own_positive or settings.mask_duplicates
        self.owners = Owners(settings.num_prototypes, settings.mask_duplicates) if masks else None

    @property
    def ready(self) -> bool:
        """Whether any slot was written."""
        return self.schedule.active > 0

    def reshard(self) -> None:
        for part in (self.for_image, self.for_text, self.owners):
            if part is not None:
                part.reshard()

    @torch.no_grad()
    def restart(self, pairs: Pairs) -> None:
        """Algorithm 1, lines 3-4: prototypes for images come from texts, prototypes for texts from images."""
        step = self.schedule.step
        renewal = self.schedule.advance(len(pairs.all_image))
        if renewal is None:
            return
        slots, rows = renewal
        share = self.for_image.share
        local = (slots >= share.start) & (slots < share.stop)
        slots, rows = (index[local].to(pairs.image.device) for index in (slots - share.start, rows))
        self.for_image.write(slots, pairs.all_text[rows], reset=self.reset_at_restart)
        self.for_text.write(slots, pairs.all_image[rows], reset=self.reset_at_restart)
        if self.owners is not None:
            self.owners.write(slots, rows, pairs, step)

    @torch.no_grad()
    def learn(self, pairs: Pairs, log_normalizer: Both, tau: Tensor, rate_factor: float = 1.0) -> None:
        """Algorithm 1, lines 6-8: `inner_steps` updates on the log-normalizers (b,), (b,) of the batch."""
        targets = gather_values(torch.stack(log_normalizer, dim=1)).unbind(dim=1)
        for prototypes, anchors, target in zip(
            self._sides(), self._anchors(pairs, tau, written=True), targets, strict=True
        ):
            prototypes.learn(
                anchors,
                target,
                steps=self.inner_steps,
                active=self.schedule.active,
                eps=self.eps,
                fit=self.fit,
                rate_factor=rate_factor,
            )

    def alpha(
        self, pairs: Pairs, tau: Tensor, *, written: bool, gradient: bool, eps: float | None = None
    ) -> Both:  # (b,), (b,)
        """The predicted log-normalizers of this rank's anchors; with `gradient`, they have one in features and
        temperature. `written`: `restart` has seen this batch, so its own features may be among the prototypes."""
        eps = self.eps if eps is None else eps
        predictions, active, rows = [], self.schedule.active, pairs.local_rows
        for side, (prototypes, anchors) in enumerate(
            zip(self._sides(), self._anchors(pairs, tau, written), strict=True)
        ):
            if gradient and torch.is_grad_enabled():
                alpha, dependence, mean_prototype = prototypes.alpha_with_slope(anchors, active=active, eps=eps)
                features = (pairs.image, pairs.text)[side]
                # d alpha = d[(e . mean_prototype - dependence s_ii) / tau], the softmax over prototypes held constant.
                slope = ((features * mean_prototype).sum(dim=1) - dependence[rows] * pairs.positive) / tau
                # Not `alpha + gradient_only(slope)`: it is more exact by one rounding, and no past run would repeat.
                predictions.append(alpha[rows] + slope - slope.detach())
            else:
                predictions.append(prototypes.alpha(anchors, active=active, eps=eps)[rows])
        return predictions[0], predictions[1]

    def restart_steps(self, batch_size: int) -> range:
        return self.schedule.last_restart(batch_size)

    def _sides(self) -> tuple[Prototypes, Prototypes]:
        return self.for_image, self.for_text

    def _anchors(self, pairs: Pairs, tau: Tensor, written: bool) -> tuple[Anchors, Anchors]:
        positive = pairs.all_positive
        log_count, masked = positive.new_tensor(math.log(self.schedule.active)), None
        if self.owners is not None:
            step = self.schedule.step - 1 if written else self.schedule.step
            masked = self.owners.masked(pairs, step, len(self.for_image.active_rows(self.schedule.active)))
            count = self.schedule.active - sum_over_ranks(masked.sum(dim=1))
            log_count = count.clamp(min=1).to(positive.dtype).log()
        return (
            anchors_at(tau.detach(), pairs.all_image, positive, log_count, masked),
            anchors_at(tau.detach(), pairs.all_text, positive, log_count, masked),
        )

    def get_extra_state(self) -> dict[str, int]:
        return self.schedule.state()

    def set_extra_state(self, state: Any) -> None:
        self.schedule.load_state(state)


class RestartSchedule:
    """Which prototypes a step renews, and from which rows of the batch (Algorithm 1, lines 3-4): a ring over the slots.

    *periodic*: one batch cannot fill more slots than it has rows, so a restart with m > B goes on over the following
    steps; slots that are not yet overwritten keep their trained value, and a restart that falls due meanwhile waits.
    *rolling*: each step replaces the oldest slots with its batch, so the prototypes are a queue.
    """

    def __init__(self, num_prototypes: int, restart: Literal["periodic", "rolling"], restart_every: int):
        self.num_prototypes, self.restart, self.restart_every = num_prototypes, restart, restart_every
        self.step = 0
        self.pending = False
        self.remaining = 0
        self.next_slot = 0
        self.active = 0  # slots that were written; they fill from the front

    def advance(self, batch: int) -> tuple[Tensor, Tensor] | None:
        """Take one step: the slots to write and the batch rows to write there, or nothing."""
        self._start_if_due()
        count = min(batch, self.remaining)
        if count == 0:
            return None
        slots = (self.next_slot + torch.arange(count)) % self.num_prototypes
        rows = torch.arange(count) * batch // count  # evenly spaced, so that every rank has its share
        self.remaining -= count
        self.next_slot = (self.next_slot + count) % self.num_prototypes
        self.active = min(self.active + count, self.num_prototypes)
        return slots, rows

    def _start_if_due(self) -> None:
        if self.restart == "rolling":
            due, self.remaining = True, 0
        else:
            due = self.step % self.restart_every == 0 if self.restart_every else self.step == 0
        self.step += 1
        self.pending |= due
        if self.pending and self.remaining == 0:
            self.pending, self.remaining = False, self.num_prototypes

    def last_restart(self, batch: int) -> range:
        """The steps at which the last restart wrote; for a queue those whose features it holds."""
        steps = -(-self.num_prototypes // batch)
        if self.restart == "rolling":
            return range(max(0, self.step - steps), self.step)
        if self.remaining:  # it still goes on
            return range(self.step - (self.num_prototypes - self.remaining) // batch, self.step)
        due = (self.step - 1) // self.restart_every * self.restart_every if self.restart_every else 0
        first = max(0, min(due, self.step - steps))  # where restarts fall due faster than they end, one follows another
        return range(first, min(first + steps, self.step))

    def state(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in ("step", "pending", "remaining", "next_slot", "active")}

    def load_state(self, state: dict[str, int]) -> None:
        self.step, self.remaining = state["step"], state["remaining"]
        self.next_slot, self.active = state["next_slot"], state["active"]
        self.pending = bool(state["pending"])


class Owners(ShardedRows):
    """The sample and caption whose features each slot holds, so that an anchor can leave out its own partner."""

    samples: Tensor  # (local share of m,)
    captions: Tensor  # (local share of m,)

    def __init__(self, num_prototypes: int, mask_duplicates: bool):
        super().__init__(num_prototypes)
        self.mask_duplicates = mask_duplicates
        self.add_rows("samples", fill=NO_OWNER)
        self.add_rows("captions", fill=NO_OWNER)

    def write(self, slots: Tensor, rows: Tensor, pairs: Pairs, step: int) -> None:
        self.samples[slots] = self._sample_keys(pairs, step)[rows]
        captions = pairs.all_caption_ids
        self.captions[slots] = NO_OWNER if captions is None else captions[rows]

    def masked(self, pairs: Pairs, step: int, active: int) -> Tensor:  # (B, local active slots) bool
        masked = self._sample_keys(pairs, step)[:, None] == self.samples[None, :active]
        if self.mask_duplicates and pairs.all_caption_ids is not None:
            masked |= pairs.all_caption_ids[:, None] == self.captions[None, :active]
        return masked

    @staticmethod
    def _sample_keys(pairs: Pairs, step: int) -> Tensor:  # (B,)
        if pairs.all_sample_ids is not None:
            return pairs.all_sample_ids
        # Without ids only this very batch can be recognised: a key that no other step has.
        batch = len(pairs.all_image)
        return NO_OWNER - 1 - step * batch - torch.arange(batch, device=pairs.image.device)
