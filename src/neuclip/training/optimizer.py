"""AdamW on the towers: parameter groups, learning rates, clipping, and the check for NaN before an update."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from neuclip.distributed.collectives import any_rank
from neuclip.models.towers import Towers
from neuclip.plan import Plan
from neuclip.settings.sections import Settings

# As in FastCLIP's code: near its floor the temperature moves more slowly.
SLOW_TEMPERATURE, SLOWED_TO = 0.03, 1 / 3


class NotFinite(Exception):
    """Loss or gradient is NaN or infinite. Nothing was updated."""


class TowerOptimizer:
    """AdamW with schedules. `update(loss, step)`, once per batch: backward, clip, check, set the learning rates, step,
    clamp the temperature."""

    def __init__(self, towers: Towers, settings: Settings, plan: Plan, precision: torch.dtype = torch.float32):
        self.towers, self.plan = towers, plan
        self.settings, self.temperature = settings.optimizer, settings.temperature
        self.adamw = torch.optim.AdamW(
            parameter_groups(towers, self.settings.weight_decay, self.settings.layer_decay),
            betas=(self.settings.beta1, self.settings.beta2),
            eps=self.settings.eps,
            # One pass over the parameters instead of ten: 10 against 78 ms per step for the tiny model on a CPU.
            fused=towers.device.type in ("cpu", "cuda"),
        )
        # Listed once: a walk through all modules takes a third of a step of locked towers.
        temperature = towers.model.logit_scale
        self.weights = [p for p in towers.parameters() if p.requires_grad and p is not temperature]
        # Loaded weights may have a temperature outside the range, such as SigLIP's 1/117: widen the range to keep it.
        loaded = towers.log_scale
        self.log_scale_range = (
            min(math.log(1 / self.temperature.maximum), loaded),
            max(math.log(1 / self.temperature.minimum), loaded),
        )
        # fp16 gradients underflow without it.
        self.scaler = torch.amp.GradScaler(towers.device.type, enabled=precision == torch.float16)

    def learning_rate(self, step: int) -> float:
        peak = self.settings.learning_rate
        return warmup_then_cosine(step, peak=peak, warmup=self.plan.warmup_steps, total=self.plan.steps)

    def update(self, loss: Tensor, step: int) -> Tensor:
        """Take one step (lines 11 and 12 of Algorithm 1). Returns the norm of the towers' gradient before clipping.

        Collective. Raises NotFinite on all ranks if loss or gradient is NaN or infinite on one.
        """
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.adamw)
        norm, norm_of_temperature = self._clip()
        if self.scaler.is_enabled():
            # With fp16 an overflowing gradient is normal: the scaler skips that step and lowers its scale.
            broken = any_rank(not torch.isfinite(loss.detach()))
        else:  # DDP has averaged the gradients: a NaN of one rank is in those of all ranks
            broken = not torch.isfinite((loss + norm + norm_of_temperature).detach())
        if broken:
            self.adamw.zero_grad(set_to_none=True)
            total_norm = torch.hypot(norm, norm_of_temperature).item()
            raise NotFinite(f"loss {loss.item():.4g}, gradient norm {total_norm:.4g}")
        self._set_rates(step)
        self.scaler.step(self.adamw)
        self.scaler.update()
        self.adamw.zero_grad(set_to_none=True)
        self.towers.clamp_log_scale(*self.log_scale_range)
        return norm

    def _clip(self) -> tuple[Tensor, Tensor]:
        """Clip towers and temperature separately. Returns their norms before clipping. In a robust loss the gradient of
        the temperature (tau rho and more) can be larger than all others together: under a common norm, clipping it
        would shrink the towers' gradient too."""
        limit = self.settings.clip_gradient_norm or torch.inf
        temperature = self.towers.model.logit_scale
        return nn.utils.clip_grad_norm_(self.weights, limit), nn.utils.clip_grad_norm_(temperature, limit)

    def _set_rates(self, step: int) -> None:
        rate = self.learning_rate(step)
        rate_of_temperature = temperature_rate(
            self.temperature.schedule,
            rate=self.temperature.learning_rate,
            towers_share=rate / self.settings.learning_rate,
            tau=1 / self.towers.logit_scale.item(),
        )
        for group in self.adamw.param_groups:
            group["lr"] = rate_of_temperature if group["name"] == "temperature" else rate * group["share_of_rate"]

    def state_dict(self) -> dict[str, Any]:
        return {
            "adamw": self.adamw.state_dict(),
            "scaler": self.scaler.state_dict(),
            "log_scale_range": self.log_scale_range,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        self.scaler.load_state_dict(state["scaler"])
        self.log_scale_range = tuple(state["log_scale_range"])


def warmup_then_cosine(step: int, *, peak: float, warmup: int, total: int) -> float:
    """Linear from 0 to `peak` over `warmup` steps, then a half cosine to 0 at step `total`.

    >>> [round(warmup_then_cosine(step, peak=1.0, warmup=2, total=6), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    if step < warmup:  # steps count from 0, and the first update already moves
        return peak * (step + 1) / warmup
    return 0.5 * peak * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def temperature_rate(schedule: str, *, rate: float, towers_share: float, tau: float) -> float:
    """The temperature's learning rate at one step.

    Only `cosine` warms up and decays, with `towers_share`, the towers' current rate over their peak. `step_threshold`
    looks at tau at each step: the full rate returns when tau rises above the threshold.

    >>> temperature_rate("step_threshold", rate=3.0, towers_share=0.1, tau=0.02)
    1.0
    """
    if schedule == "cosine":
        return rate * towers_share
    if schedule == "step_threshold" and tau <= SLOW_TEMPERATURE:
        return rate * SLOWED_TO
    return rate


def parameter_groups(towers: Towers, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
    """AdamW's parameter groups: matrices with weight decay; vectors and scalars (gains, biases, class tokens, SigLIP's
    logit bias) without; the temperature alone, without. With `layer_decay` the first two exist once per distance from
    the heads. Locked weights are in no group."""
    temperature = towers.model.logit_scale
    others = [p for p in towers.parameters() if p.requires_grad and p is not temperature]
    distances = distances_from_heads(towers) if layer_decay < 1 else {}
    groups: list[dict[str, Any]] = []
    for distance in sorted({distances.get(id(p), 0) for p in others}):
        near = [p for p in others if distances.get(id(p), 0) == distance]
        common = {"share_of_rate": layer_decay**distance}
        decayed, plain = [p for p in near if p.ndim >= 2], [p for p in near if p.ndim < 2]
        groups.append({"name": "weights", "params": decayed, "weight_decay": weight_decay} | common)
        groups.append({"name": "no decay", "params": plain, "weight_decay": 0.0} | common)
    groups.append({"name": "temperature", "params": [temperature], "weight_decay": 0.0, "share_of_rate": 1.0})
    return [group for group in groups if group["params"]]


def distances_from_heads(towers: Towers) -> dict[int, int]:
    """For each weight, by its `id()`: the number of layers above it in its tower, the projection included."""
    return {
        id(parameter): distance
        for parts in (towers.image_parts, towers.text_parts)
        for distance, layer in enumerate(reversed(parts.layers), start=1)
        for parameter in layer
    }
