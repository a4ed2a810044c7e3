"""Each tower trained, locked or adapted by LoRA, as `model.image_tower` and `model.text_tower` say."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.errors import UserError
from neuclip.models.lora import add_lora
from neuclip.models.parts import TowerParts
from neuclip.models.towers import Towers
from neuclip.settings.sections import ModelSettings


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
    if len(changed) == 2 and not any(p.requires_grad for parts in changed for p in _parameters(parts)):
        raise UserError(
            f"{settings.name} has no projections that could train, and both towers are locked: nothing would train; "
            "give --model.text_tower train, or --model.text_unlocked_layers 1"
        )
    in_eval = [locked for parts in changed for module in parts.modules for locked in locked_modules(module)]
    if settings.batch_norm == "frozen":
        # The running statistics belong to the pretrained weights: with those of other images the features are others.
        in_eval += [module for module in towers.modules() if isinstance(module, _BatchNorm)]
    towers.keep_in_eval(in_eval)


def locked_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The largest modules inside in which no weight trains: dropout, patch dropout and BatchNorm of them stay as in
    evaluation. Modules without weights belong to the locked ones beside them."""
    trained = {parameter.requires_grad for parameter in module.parameters()}
    if True not in trained:
        yield module
    elif False in trained:
        for child in module.children():
            yield from locked_modules(child)


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
    for parameter in parts.trunk_parameters:
        parameter.requires_grad_(False)
    if not sum(add_lora(module, rank=settings.lora_rank, alpha=settings.lora_alpha) for module in parts.modules):
        raise UserError(
            f"model.{side}_tower lora: the {side} tower of {settings.name} has no transformer blocks, whose attention "
            f"LoRA adapts; give --model.{side}_tower locked or train"
        )


def _parameters(parts: TowerParts) -> Iterator[nn.Parameter]:
    yield from parts.head_parameters
    for module in parts.modules:
        yield from module.parameters()
