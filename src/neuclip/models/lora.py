"""LoRA: W + (alpha / rank) B A, where only B and A train, beside frozen weights of attention and MLPs.

As a parametrization of `torch.nn.utils.parametrize`, a weight is replaced wherever it is read, also in open_clip's
packed attention, which hands `in_proj_weight` to a function and never calls a layer that could be wrapped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.utils import parametrize

ATTENTION = ("attn", "attention", "self_attn")  # what open_clip, timm and transformers call it in a block
PACKED = ("in_proj_weight", "qkv")  # query, key and value in one matrix: each gets B and A of its own
PARAMETRIZATIONS, ORIGINAL, FIRST = "parametrizations.", ".original", ".0."  # in torch's names of state
SAVED = ".lora."  # in the names of an adapter file: WEIGHT.lora.a


class LowRank(nn.Module):
    """What is added to a weight (out, in): `b` (n, out / n, rank) times `a` (n, rank, in), for n stacked matrices."""

    scale: Tensor

    def __init__(self, weight: Tensor, *, rank: int, alpha: float, stacked: int = 1):
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(weight.new_empty(stacked, rank, columns))
        self.b = nn.Parameter(weight.new_zeros(stacked, rows // stacked, rank))  # 0: it starts as its base
        self.register_buffer("scale", weight.new_tensor(alpha / rank))
        for matrix in self.a:
            nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        return add_low_rank(weight, self.a, self.b, self.scale)


def add_low_rank(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return weight + scale * (b @ a).flatten(0, 1)


def add_lora(tower: nn.Module, *, rank: int, alpha: float) -> int:
    """Adapt every attention and MLP weight of a tower's transformer blocks; how many there are."""
    adapted = list(_adaptable(tower))  # before the first is changed
    for module, field, stacked in adapted:
        weight = getattr(module, field)
        low_rank = LowRank(weight.detach(), rank=rank, alpha=alpha, stacked=stacked)
        parametrize.register_parametrization(module, field, low_rank)
    return len(adapted)


def _adaptable(tower: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
    """Module, name of its weight, and how many matrices are stacked in it."""
    blocks = [block for block in tower.modules() if any(hasattr(block, name) for name in ATTENTION)]
    seen: set[int] = set()
    for block in blocks:
        for name, module in block.named_modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            if isinstance(getattr(module, PACKED[0], None), Tensor):
                yield module, PACKED[0], 3
            elif isinstance(module, nn.Linear):
                yield module, "weight", 3 if name.rpartition(".")[2] == PACKED[1] else 1


def merge(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a model with LoRA as that of a plain model: its names, its weights. Without LoRA, the same state."""
    merged = {}
    for name, tensor in state.items():
        before, found, after = name.partition(PARAMETRIZATIONS)
        if not found:
            merged[name] = tensor
        elif after.endswith(ORIGINAL):
            low_rank = [state[name.removesuffix(ORIGINAL) + FIRST + part] for part in ("a", "b", "scale")]
            merged[before + after.removesuffix(ORIGINAL)] = add_low_rank(tensor, *low_rank)
    return merged


def remove_lora(model: nn.Module) -> None:
    """Leave a plain model with the merged weights. A model without LoRA stays as it is."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            for field in list(module.parametrizations):  # type: ignore[union-attr, arg-type]
                parametrize.remove_parametrizations(module, field, leave_parametrized=True)


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """What training changes of a model with LoRA: B and A of each weight, heads, temperature and bias. Empty without
    LoRA."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        before, found, after = name.partition(PARAMETRIZATIONS)
        if found and FIRST in after:
            field, _, part = after.partition(FIRST)
            state[f"{before}{field}{SAVED}{part}"] = tensor
        elif not found and name in trained:
            state[name] = tensor
    return state if any(SAVED in name for name in state) else {}


def apply_adapter(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The plain state of `base` with an adapter that was trained on it: what the merged model holds."""
    merged = dict(base) | {name: tensor for name, tensor in adapter.items() if SAVED not in name}
    for name in adapter:
        weight, found, part = name.partition(SAVED)
        if found and part == "a":
            merged[weight] = add_low_rank(base[weight], *(adapter[weight + SAVED + x] for x in ("a", "b", "scale")))
    return merged
