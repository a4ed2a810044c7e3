"""The state of torch's random generators, on the host and on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from neuclip.distributed.collectives import gather_values, rank


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type in ("cuda", "mps"):
        state[device.type] = getattr(torch, device.type).get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type in state and device.type != "cpu":
        getattr(torch, device.type).set_rng_state(state[device.type])


def gather_random_states(device: torch.device) -> dict[str, Tensor]:
    """Collective. One row per rank."""
    return {name: gather_values(row[None].to(device)).cpu() for name, row in random_state(device).items()}


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Each rank takes its own row; a rank that did not exist before keeps its seed."""
    if rank() < len(states["cpu"]):
        # Cloned, because torch reads a state from the start of its storage, and a row is not there.
        set_random_state({name: rows[rank()].clone() for name, rows in states.items()}, device)
