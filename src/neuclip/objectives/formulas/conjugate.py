"""The variational form that NeuCLIP trains: log z = min over alpha of z exp(-alpha) + alpha - 1 (Eq. 5)."""

from __future__ import annotations

import torch
from torch import Tensor

# exp() of the exponent log(eps+g) - alpha is weighed against numbers of order 1; beyond this it would leave the range
# in which float32 (or float64) products of it stay finite. What is capped is counted by the objective.
LARGEST_EXPONENT = {torch.float32: 40.0, torch.float64: 300.0}


def capped_exponent(log_normalizer: Tensor, alpha: Tensor) -> Tensor:  # (b,), (b,) -> (b,)
    """log(eps+g) - alpha, capped in value but not in gradient: a capped anchor still pulls alpha the right way."""
    exponent = log_normalizer - alpha
    return exponent - (exponent - LARGEST_EXPONENT[exponent.dtype]).clamp(min=0).detach()


def calibration_ratio(log_normalizer: Tensor, alpha: Tensor) -> Tensor:  # (b,), (b,) -> (b,)
    """r = exp(log(eps+g) - alpha), true over predicted normalizer: 1 when alpha is right."""
    return torch.exp(capped_exponent(log_normalizer, alpha))
