"""Each tower trained, locked or adapted by LoRA, as `model.image_tower` and `model.text_tower` say.

LoRA is W + (alpha / rank) B A, where only B and A train, beside frozen weights of attention and MLPs. As a
parametrization of `torch.nn.utils.parametrize`, a weight is replaced wherever it is read, also in open_clip's packed
attention, which hands `in_proj_weight` to a function and never calls a layer that could be wrapped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from neuclip.errors import UserError
from neuclip.models.parts import TowerParts
from neuclip.models.towers import Towers
from neuclip.settings.sections import ModelSettings

ATTENTION = ("attn", "attention", "self_attn")  # what open_clip, timm and transformers call it in a block
PACKED = ("in_proj_weight", "qkv")  # query, key and value in one matrix: each gets B and A of its own
PARAMETRIZATIONS, ORIGINAL = "parametrizations.", ".original"  # in torch's names of state


def apply_modes(towers: Towers, settings: ModelSettings) -> None:
    """Before the optimizer and DDP are made: neither knows weights that need no gradient."""
    sides = (
        ("image", settings.image_tower, settings.image_unlocked_layers, towers.image_parts),
        ("text", settings.text_tower, settings.text_unlocked_layers, towers.text_parts),
    )
    changed = [parts for _, mode, _, parts in sides if mode != "train"]
    for side, mode, unlocked, parts in sides:
        if unlocked and mode != "locked":
            raise UserError(
                f"model.{side}_unlocked_layers is {unlocked}, and model.{side}_tower is {mode}; "
                f"give --model.{side}_tower locked too"
            )
        if mode == "locked":
            _lock(side, parts, unlocked)
            if not unlocked:
                towers.locked[side] = parts
        elif mode == "lora":
            _adapt(side, parts, settings)
    if not any(p.requires_grad for name, p in towers.model.named_parameters() if not name.startswith("logit_")):
        raise UserError(
            f"{settings.name} has no projections that could train, and both towers are locked: nothing would train; "
            "give --model.text_tower train, or --model.text_unlocked_layers 1"
        )
    in_eval = [locked for parts in changed for module in parts.modules for locked in _locked_modules(module)]
    if settings.batch_norm == "frozen":
        # The running statistics belong to the pretrained weights: with those of other images the features are others.
        in_eval += [module for module in towers.modules() if isinstance(module, _BatchNorm)]
    towers.keep_in_eval(in_eval)


def _locked_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The largest modules inside in which no weight trains: dropout, patch dropout and BatchNorm of them stay as in
    evaluation. Modules without weights belong to the locked ones beside them."""
    trained = {parameter.requires_grad for parameter in module.parameters()}
    if True not in trained:
        yield module
    elif False in trained:
        for child in module.children():
            yield from _locked_modules(child)


def _lock(side: str, parts: TowerParts, unlocked: int) -> None:
    layers = len(parts.layers)
    if unlocked > layers:
        raise UserError(
            f"model.{side}_unlocked_layers is {unlocked}, and the {side} tower has {layers} layers below its "
            f"projection; give 0 to {layers}, or --model.{side}_tower train"
        )
    for layer in parts.layers[: layers - unlocked]:
        for parameter in layer:
            parameter.requires_grad_(False)


def _adapt(side: str, parts: TowerParts, settings: ModelSettings) -> None:
    """Every attention and MLP weight of a tower's transformer blocks."""
    adapted = [found for module in parts.modules for found in _adaptable(module)]
    if not adapted:
        raise UserError(
            f"model.{side}_tower lora: the {side} tower of {settings.name} has no transformer blocks, whose attention "
            f"LoRA adapts; give --model.{side}_tower locked or train"
        )
    largest = max(min(len(weight) // stacked, weight.shape[1]) for _, _, weight, stacked in adapted)
    if settings.lora_rank > largest:
        raise UserError(
            f"model.lora_rank is {settings.lora_rank}, and no matrix of the {side} tower has a rank above {largest}; "
            f"give --model.lora_rank {largest} or less; 2 to 16 are usual"
        )
    for parameter in parts.trunk_parameters:
        parameter.requires_grad_(False)
    for module, field, weight, stacked in adapted:
        low_rank = LowRank(weight.detach(), rank=settings.lora_rank, alpha=settings.lora_alpha, stacked=stacked)
        parametrize.register_parametrization(module, field, low_rank)


def _adaptable(tower: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, int]]:
    """Module, name of its weight, the weight, and how many matrices are stacked in it."""
    blocks = [block for block in tower.modules() if any(hasattr(block, name) for name in ATTENTION)]
    seen: set[int] = set()
    for block in blocks:
        for name, module in block.named_modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            packed = getattr(module, PACKED[0], None)
            if isinstance(packed, Tensor):
                yield module, PACKED[0], packed, 3
            elif isinstance(module, nn.Linear):
                yield module, "weight", module.weight, 3 if name.rpartition(".")[2] == PACKED[1] else 1


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


def merge_lora(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a model with LoRA as that of a plain model: its names, its weights. Without LoRA, the same state."""
    merged = {}
    for name, tensor in state.items():
        before, found, after = name.partition(PARAMETRIZATIONS)
        if not found:
            merged[name] = tensor
        elif after.endswith(ORIGINAL):
            low_rank = [state[f"{name.removesuffix(ORIGINAL)}.0.{part}"] for part in ("a", "b", "scale")]
            merged[before + after.removesuffix(ORIGINAL)] = add_low_rank(tensor, *low_rank)
    return merged
