"""What is compared, and every value that was tried: five configurations per method, the same budget for each.

All of them are tuned on the icons at batch 128. What a method is stands in `fixed`; `tried` holds what tuning may
choose between: the temperature's course (rho, or its rate and start where there is no rho) and the one knob that
matters most to its normalizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Flags = dict[str, str]
TUNED_BATCH = 128


@dataclass(frozen=True)
class Method:
    """`fixed` flags in every run; `tried` is one mapping of flags per tuning run. What counts steps or refers to the
    batch follows from its size instead of being tuned again: `restarts_follow_batch` keeps the samples between
    restarts, `rho_follows_batch` is for normalizers of the batch, whose divergence from uniform ends at log(B - 1)."""

    name: str
    fixed: Flags
    tried: tuple[Flags, ...]
    restarts_follow_batch: bool = False
    rho_follows_batch: bool = False

    def small_batch(self, choice: int, batch_size: int) -> Flags:
        given, flags, ratio = self.fixed | self.tried[choice], {}, TUNED_BATCH // batch_size
        if self.restarts_follow_batch:
            flags["objective.restart_every"] = str(int(given["objective.restart_every"]) * ratio)
        if self.rho_follows_batch:
            flags["objective.rho"] = f"{float(given['objective.rho']) - math.log(ratio):.3g}"
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
            {TEMPERATURE_RATE: "2e-2"},
            {TEMPERATURE_RATE: "8e-3", "temperature.initial": "0.05"},
        ),
    ),
    Method(
        "minibatch",
        {"objective": "clip", "objective.form": "minibatch"},
        (
            *rho(2.5, 3.5, 4.5),
            {"objective.rho": "3.5", TEMPERATURE_RATE: "8e-3"},
            {"objective.rho": "3.5", TEMPERATURE_RATE: "5e-4"},
        ),
        rho_follows_batch=True,
    ),
    Method(
        "siglip",
        {"objective": "siglip", "temperature.initial": "0.1"},  # its authors' start; -4.84 is -ln(128 - 1)
        (
            {"model.bias_initial": "-10", TEMPERATURE_RATE: "8e-3"},
            {"model.bias_initial": "-4.84", TEMPERATURE_RATE: "2e-3"},
            {"model.bias_initial": "-4.84", TEMPERATURE_RATE: "8e-3"},
            {"model.bias_initial": "-4.84", TEMPERATURE_RATE: "2e-2"},
            {"model.bias_initial": "-4.84", TEMPERATURE_RATE: "8e-3", "temperature.initial": "0.07"},
        ),
    ),
    Method(
        "fastclip",
        {"objective": "fastclip"},
        (
            *rho(3.5, 4.5, 6.5),  # at its authors' gamma, 0.2
            {"objective.rho": "4.5", "objective.gamma": "0.6"},
            {"objective.rho": "4.5", "objective.gamma": "0.9"},
        ),
    ),
    Method(
        "amorlip",
        {"objective": "amorlip"},
        (
            {"objective.rho": "8.5,-8.5,-8.5"},  # its authors' for CC12M
            {"objective.rho": "4.5,-4.5,-4.5"},
            {"objective.rho": "4.5"},
            {"objective.rho": "4.5,-4.5,-4.5", "objective.blend_maximum": "0.4"},
            {"objective.rho": "4.5,-4.5,-4.5", "objective.network_lr": "5e-3"},
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
        (
            *rho(3.5, 4.5, 6.5),
            {"objective.rho": "3.5", TEMPERATURE_RATE: "8e-3"},
            {"objective.rho": "3.5", TEMPERATURE_RATE: "5e-4"},
        ),
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
        (
            *rho(3.5, 4.5, 6.5),
            {"objective.rho": "3.5", "objective.num_prototypes": "2048", "objective.restart_every": "16"},
            {"objective.rho": "3.5", "objective.network_lr": "0.05"},
        ),
        restarts_follow_batch=True,  # the same ring: each slot renewed every m samples
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
        (
            *rho(3.5, 4.5, 6.5),
            {"objective.rho": "4.5", "objective.network_lr": "0.003"},
            {"objective.rho": "4.5", "objective.network_lr": "0.001"},
        ),
    ),
    Method(
        "queue",
        {
            "objective": "neuclip",
            "objective.restart": "rolling",
            "objective.num_prototypes": "1024",
            "objective.inner_steps": "0",
        },
        (
            *rho(3.5, 4.5, 6.5),
            {"objective.rho": "4.5", "objective.num_prototypes": "2048"},
            {"objective.rho": "4.5", "objective.num_prototypes": "4096"},
        ),
    ),
)
