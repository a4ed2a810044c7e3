"""Between two models of one architecture: WiSE-FT (Wortsman et al., arXiv 2109.01903)."""

from __future__ import annotations

import torch
from torch import Tensor

from neuclip.errors import UserError


@torch.no_grad()
def interpolate(base: dict[str, Tensor], tuned: dict[str, Tensor], weight: float) -> dict[str, Tensor]:
    """(1 - weight) base + weight tuned, tensor by tensor; `tuned` was fine-tuned from `base`.

    In float32 whatever the tensors are. The temperature is interpolated as the logarithm that it is stored as.
    Integers, such as BatchNorm's count of batches, are those of `tuned`; its running statistics are interpolated.

    >>> interpolate({"w": torch.zeros(2)}, {"w": torch.ones(2)}, 0.25)["w"]
    tensor([0.2500, 0.2500])
    """
    shapes, others = ({name: tensor.shape for name, tensor in state.items()} for state in (base, tuned))
    if different := sorted({name for name, _ in shapes.items() ^ others.items()}):
        raise UserError(
            f"the two models differ in {len(different):,} of their weights, the first is {different[0]}; "
            "give a model and what was fine-tuned from it"
        )
    return {
        name: torch.lerp(base[name].float(), tensor.float(), weight).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor.clone()
        for name, tensor in tuned.items()
    }
