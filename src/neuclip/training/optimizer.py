"""AdamW on the towers: groups, clipping, a rate of its own for the temperature, and the stop before a bad update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from neuclip.distributed.collectives import any_rank
from neuclip.models.towers import Towers
from neuclip.plan import Plan
from neuclip.settings.sections import Settings
from neuclip.training.schedule import temperature_rate, warmup_then_cosine


class NotFinite(Exception):
    """Loss or gradient is not a number; nothing was updated."""


class TowerOptimizer:
    """One `update(loss, step)` per batch: backward, clip, check, set the rates, step, clamp the temperature."""

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
        # Weights may come with a temperature outside the range, as SigLIP's 1/117: it is not cut at the first step.
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

    def rate_factor(self, step: int) -> float:
        """The present learning rate over its peak."""
        return self.learning_rate(step) / self.settings.learning_rate

    def update(self, loss: Tensor, step: int, backward: Callable[[Tensor], None] = Tensor.backward) -> Tensor:
        """The norm of the towers' gradient before clipping. Collective: not a number on one rank stops all."""
        backward(self.scaler.scale(loss))
        self.scaler.unscale_(self.adamw)
        norm, norm_of_temperature = self._clip()
        # With fp16 an overflowing gradient is normal: the scaler skips that step and lowers its scale.
        checked = loss if self.scaler.is_enabled() else loss + norm + norm_of_temperature
        if any_rank(not torch.isfinite(checked.detach())):
            self.adamw.zero_grad(set_to_none=True)
            whole = torch.hypot(norm, norm_of_temperature).item()
            raise NotFinite(f"loss {loss.item():.4g}, gradient norm {whole:.4g}")
        self._set_rates(step)
        self.scaler.step(self.adamw)
        self.scaler.update()
        self.adamw.zero_grad(set_to_none=True)
        self.towers.clamp_log_scale(*self.log_scale_range)
        return norm

    def _clip(self) -> tuple[Tensor, Tensor]:
        """Clip towers and temperature, each by itself; their norms before. In a robust loss the temperature's gradient
        (tau rho and more) can be larger than all others together, and would take their share of a common norm."""
        limit = self.settings.clip_gradient_norm or torch.inf
        temperature = self.towers.model.logit_scale
        others = [parameter for parameter in self.towers.parameters() if parameter is not temperature]
        return nn.utils.clip_grad_norm_(others, limit), nn.utils.clip_grad_norm_(temperature, limit)

    def _set_rates(self, step: int) -> None:
        rate = self.learning_rate(step)
        rate_of_temperature = temperature_rate(
            self.temperature.schedule,
            rate=self.temperature.learning_rate,
            towers_share=self.rate_factor(step),
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


def parameter_groups(towers: Towers, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
    """Weights with decay; vectors and scalars (gains, biases, class tokens, SigLIP's logit bias) without; the
    temperature in a group of its own, also without. With `layer_decay` such groups for each distance from the heads.
    Locked weights are in none."""
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
    """By id of a weight: how many layers above it its tower has, the projection included."""
    return {
        id(parameter): distance
        for parts in (towers.image_parts, towers.text_parts)
        for distance, layer in enumerate(reversed(parts.layers), start=1)
        for parameter in layer
    }
