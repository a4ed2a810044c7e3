"""Train, lock or adapt each tower by LoRA, as `model.image_tower` and `model.text_tower` say.

LoRA is W + (alpha / rank) B A: W, a weight of attention or MLP, is frozen, and B and A train. It is a parametrization
of `torch.nn.utils.parametrize`, which applies wherever a weight is read. Wrapping layers would not be enough: the
packed attention of open_clip passes `in_proj_weight` to a function.
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

ATTENTION = ("attn", "attention", "self_attn")  # names of attention in blocks of open_clip, timm and transformers
PACKED = ("in_proj_weight", "qkv")  # query, key and value in one matrix: each gets its own B and A
PARAMETRIZATIONS, ORIGINAL = "parametrizations.", ".original"  # parts of names in torch's state dicts


def apply_modes(towers: Towers, settings: ModelSettings) -> None:
    """Lock or adapt the towers as the settings say. Call it before the optimizer and DDP are made: both must skip
    locked weights."""
    sides = (
        ("image", settings.image_tower, settings.image_unlocked_layers, towers.image_parts),
        ("text", settings.text_tower, settings.text_unlocked_layers, towers.text_parts),
    )
    changed = [parts for _, mode, _, parts in sides if mode != "train"]
    for side, mode, unlocked, parts in sides:
        if unlocked and mode != "locked":
            raise UserError(
                f"model.{side}_unlocked_layers is {unlocked}, but model.{side}_tower is {mode}; "
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
            f"both towers are locked and {settings.name} has no projections: nothing would train; "
            "give --model.text_tower train, or --model.text_unlocked_layers 1"
        )
    in_eval = [locked for parts in changed for module in parts.modules for locked in _locked_modules(module)]
    if settings.batch_norm == "frozen":
        # The running statistics belong to the pretrained weights: statistics of other images would change the features.
        in_eval += [module for module in towers.modules() if isinstance(module, _BatchNorm)]
    towers.keep_in_eval(in_eval)


def _locked_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The largest submodules in which no weight trains. Their dropout, patch dropout and BatchNorm work as in
    evaluation. A module without weights counts as locked if its neighbours are."""
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
            f"model.{side}_unlocked_layers is {unlocked}, but the {side} tower has {layers} layers below its "
            f"projection; give 0 to {layers}, or --model.{side}_tower train"
        )
    for layer in parts.layers[: layers - unlocked]:
        for parameter in layer:
            parameter.requires_grad_(False)


def _adapt(side: str, parts: TowerParts, settings: ModelSettings) -> None:
    """Add LoRA to every attention and MLP weight of a tower's transformer blocks."""
    adapted = [target for module in parts.modules for target in _adaptable(module)]
    if not adapted:
        raise UserError(
            f"model.{side}_tower is lora, but the {side} tower of {settings.name} has no transformer blocks to adapt; "
            f"give --model.{side}_tower locked or train"
        )
    largest = max(min(len(weight) // stacked, weight.shape[1]) for _, _, weight, stacked in adapted)
    if settings.lora_rank > largest:
        raise UserError(
            f"model.lora_rank is {settings.lora_rank}, but no matrix of the {side} tower has a rank above {largest}; "
            f"give --model.lora_rank {largest} or less; 2 to 16 are usual"
        )
    for parameter in parts.trunk_parameters:
        parameter.requires_grad_(False)
    for module, field, weight, stacked in adapted:
        low_rank = LowRank(weight.detach(), rank=settings.lora_rank, alpha=settings.lora_alpha, stacked=stacked)
        parametrize.register_parametrization(module, field, low_rank)


def _adaptable(tower: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, int]]:
    """The weights that LoRA adapts: module, name of the weight, the weight, number of matrices stacked in it."""
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
    """Adds scale * b a to a weight (out, in) of n stacked matrices: `b` (n, out / n, rank), `a` (n, rank, in)."""

    scale: Tensor

    def __init__(self, weight: Tensor, *, rank: int, alpha: float, stacked: int = 1):
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(weight.new_empty(stacked, rank, columns))
        self.b = nn.Parameter(weight.new_zeros(stacked, rows // stacked, rank))  # 0: it starts as the base weight
        self.register_buffer("scale", weight.new_tensor(alpha / rank))
        for matrix in self.a:
            nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        return add_low_rank(weight, self.a, self.b, self.scale)


def add_low_rank(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return weight + scale * (b @ a).flatten(0, 1)


def merge_lora(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a model with LoRA as that of a plain model. Without LoRA it is unchanged."""
    merged = {}
    for name, tensor in state.items():
        before, marker, after = name.partition(PARAMETRIZATIONS)
        if not marker:
            merged[name] = tensor
        elif after.endswith(ORIGINAL):
            low_rank = [state[f"{name.removesuffix(ORIGINAL)}.0.{part}"] for part in ("a", "b", "scale")]
            merged[before + after.removesuffix(ORIGINAL)] = add_low_rank(tensor, *low_rank)
    return merged
