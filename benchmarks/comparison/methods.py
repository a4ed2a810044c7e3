"""What is compared, and every value that was tried: three configurations per method, the same budget for each.

All of them are tuned on the icons at batch 128. What a method is stands in `fixed`; `tried` holds what tuning may
choose between: the temperature's course (rho, or its rate and start where there is no rho) and the one knob that
matters most to its normalizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Flags = dict[str, str]


@dataclass(frozen=True)
class Method:
    """`fixed` flags in every run; `tried` is one mapping of flags per tuning run. What counts steps or refers to the
    batch follows from its size instead of being tuned again: `at_batch_32`, and `rho_follows_batch` where the
    normalizer is the batch's own, whose divergence from uniform ends at log(B - 1)."""

    name: str
    fixed: Flags
    tried: tuple[Flags, ...]
    at_batch_32: Flags | None = None
    rho_follows_batch: bool = False

    def small_batch(self, choice: int, batch_size: int) -> Flags:
        if batch_size != 32:
            return {}
        flags = dict(self.at_batch_32 or {})
        if self.rho_follows_batch:
            flags["objective.rho"] = f"{float(self.tried[choice]['objective.rho']) - math.log(128 / 32):.3g}"
        return flags


def rho(*values: float) -> tuple[Flags, ...]:
    return tuple({"objective.rho": str(value)} for value in values)


TEMPERATURE_RATE = "temperature.learning_rate"

METHODS = (
    Method(
        "clip",
        {"objective": "clip"},
        (
            {TEMPERATURE_RATE: "2e-3"},
            {TEMPERATURE_RATE: "8e-3"},
            {TEMPERATURE_RATE: "2e-3", "temperature.initial": "0.03"},
        ),
    ),
    Method(
        "minibatch", {"objective": "clip", "objective.form": "minibatch"}, rho(2.5, 3.5, 4.5), rho_follows_batch=True
    ),
    Method(
        "siglip",
        {"objective": "siglip", "temperature.initial": "0.1"},  # its authors' start
        (
            {"objective.bias_initial": "-10", TEMPERATURE_RATE: "8e-3"},
            {"objective.bias_initial": "auto", TEMPERATURE_RATE: "2e-3"},
            {"objective.bias_initial": "auto", TEMPERATURE_RATE: "8e-3"},
        ),
    ),
    Method(
        "fastclip",
        {"objective": "fastclip", "objective.variant": "v3"},
        rho(3.5, 4.5, 6.5),
    ),
    Method(
        "amorlip",
        {"objective": "amorlip"},
        (
            {"objective.rho": "8.5,-8.5,-8.5"},  # its authors' for CC12M
            {"objective.rho": "4.5,-4.5,-4.5"},
            {"objective.rho": "4.5"},
        ),
    ),
    Method(
        "neuclip-paper",
        {
            "objective": "neuclip",
            "objective.num_prototypes": "4096",
            "objective.restart_every": "500",
            "objective.inner_steps": "10",
            "objective.network_lr": "1.0",
        },
        rho(3.5, 4.5, 6.5),
    ),
    Method(
        "neuclip-tuned",
        {
            "objective": "neuclip",
            "objective.num_prototypes": "1024",
            "objective.restart_every": "8",
            "objective.inner_steps": "3",
            "objective.network_lr": "0.01",
        },
        rho(3.5, 4.5, 6.5),
        at_batch_32={"objective.restart_every": "32"},  # the same ring: each slot renewed every 1,024 samples
    ),
    Method(
        "rolling",
        {
            "objective": "neuclip",
            "objective.restart": "rolling",
            "objective.num_prototypes": "1024",
            "objective.inner_steps": "2",
            "objective.network_lr": "0.01",
        },
        rho(3.5, 4.5, 6.5),
    ),
    Method(
        "queue",
        {
            "objective": "neuclip",
            "objective.restart": "rolling",
            "objective.num_prototypes": "1024",
            "objective.inner_steps": "0",
        },
        rho(3.5, 4.5, 6.5),
    ),
)
