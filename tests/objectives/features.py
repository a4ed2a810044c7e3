"""Batches and methods for the tests of objectives, and how close two results have to be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip import CLIP, SCENT, AmorLIP, DRRho, FastCLIP, NeuCLIP, SigLIP
from neuclip.objectives.objective import Objective

B, D, N = 8, 8, 19  # pairs of a batch, their width, samples of the data set; 19 divides over neither 2 nor 4 ranks
# What every test of a family goes over. AdaGrad from zero moves a coordinate by the whole rate whatever its gradient's
# size, so the sign of a gradient of 1e-17 would show: masked prototypes, which are right at once, do not learn here.
METHODS: dict[str, Callable[[], Objective]] = {
    "clip": CLIP,
    "mini-batch form": lambda: CLIP(form="minibatch", rho=2.0, mask_duplicates=True),
    "siglip": SigLIP,
    "siglip, masked": lambda: SigLIP(mask_duplicates=True),
    "fastclip": lambda: FastCLIP(N, gamma_decay_samples=50),
    "fastclip, constant": lambda: FastCLIP(N, temperature="constant", gamma_schedule="constant", mask_duplicates=True),
    "fastclip, individual": lambda: FastCLIP(N, temperature="individual", gamma=0.3, total_samples=90),
    "scent": lambda: SCENT(N, log_alpha=1.0),
    "scent, masked": lambda: SCENT(N, temperature_gradient="fastclip", mask_duplicates=True),
    "drrho": lambda: DRRho(N, reference=reference_features(N)),
    "drrho, with memory": lambda: DRRho(
        N, reference=reference_features(N), gamma=0.4, gamma_schedule="constant", temperature="global"
    ),
    "amorlip": lambda: AmorLIP(D, dataset_size=3 * B, total_samples=9 * B, network_lr=0.01),
    "neuclip": lambda: NeuCLIP(D, num_prototypes=7, inner_steps=2, restart_every=3, network_lr=0.1),
    "neuclip, filled over several steps": lambda: NeuCLIP(
        D, num_prototypes=25, inner_steps=2, restart_every=4, network_lr=0.1
    ),
    "neuclip, rolling": lambda: NeuCLIP(D, num_prototypes=10, restart="rolling", inner_steps=1, network_lr=0.1),
    "neuclip, rolling and masked": lambda: NeuCLIP(
        D, num_prototypes=10, restart="rolling", inner_steps=0, mask_own_positive=True, mask_duplicates=True
    ),
    "neuclip, mlp": lambda: NeuCLIP(D, network="mlp", inner_steps=2),
    "neuclip, simultaneous": lambda: NeuCLIP(D, num_prototypes=4, update="simultaneous", alpha_gradient="detached"),
    "neuclip, separate": lambda: NeuCLIP(D, num_prototypes=4, inner_steps=2, fit="separate", network_lr=0.1),
}
every_method = pytest.mark.parametrize("method", METHODS)


def unit(*shape: int, seed: int) -> Tensor:
    """Random unit rows in float64."""
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def reference_features(samples: int) -> tuple[Tensor, Tensor]:
    """Of images and texts, in another width, in the type that large sets are stored in."""
    return unit(samples, 5, seed=50).half(), unit(samples, 5, seed=51).half()


def number(value: float) -> Tensor:
    """A scalar in float64 with gradient."""
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def batch(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What an objective is given in that step; samples and captions come again, and in step 4 a sample comes twice."""
    image, text = (unit(B, D, seed=step + shift).to(dtype).requires_grad_() for shift in (0, 100))
    ids = (3 * step + torch.arange(B)) % N
    if step == 4:
        ids[-1] = ids[0]
    scale, bias = (torch.tensor(x, dtype=dtype, requires_grad=True) for x in (10.0, -5.0))
    return {
        "image_features": image,
        "text_features": text,
        "logit_scale": scale,
        "logit_bias": bias,
        "sample_ids": ids,
        "caption_ids": ids % 4,
    }


def run(objective: Objective, steps: range, dtype: torch.dtype = torch.float32) -> list[float]:
    return [objective(**batch(step, dtype)).item() for step in steps]


def estimates(objective: Objective, step: int, dtype: torch.dtype = torch.float32, **eps: float) -> Tensor:  # (2, B)
    given = batch(step, dtype)
    names = ("image_features", "text_features", "logit_scale", "sample_ids")
    return torch.stack(objective.log_normalizers(*(given[name] for name in names), **eps))


def same_state(one: dict, other: dict, *, but: tuple[str, ...] = ()) -> bool:
    """To the bit, where NaN equals NaN; keys that end in one of `but` are not compared."""

    def same(a, b) -> bool:
        if not isinstance(a, Tensor):
            return a == b
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())

    return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one if not key.endswith(but or "?"))


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item()))


def same_gradients(got: Tensor, want: Tensor, inputs: list[Tensor], tolerance: float) -> bool:
    """Of two scalars in the same inputs, each difference measured by the largest number of that gradient or 1."""
    gradients = (torch.autograd.grad(x, inputs, allow_unused=True, materialize_grads=True) for x in (got, want))
    return all(close(a, b, tolerance) for a, b in zip(*gradients, strict=True))
