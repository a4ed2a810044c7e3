"""A tower of open_clip taken apart: trunk and head, and the trunk's layers from input to output.

The head is the projection to the embedding. It is the part that trains where the rest of a tower is locked, and the
trunk's features are what may be computed once and stored then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from neuclip.models import open_clip_module

Parameters = list[nn.Parameter]


@dataclass(frozen=True)
class TowerParts:
    """`head(trunk(inputs))` is what the tower gives before its rows are normalized."""

    modules: list[nn.Module]  # that make up the tower; its head may be left out
    trunk: Callable[[Tensor], Tensor]  # images or tokens -> (b, width)
    head: Callable[[Tensor], Tensor]  # (b, width) -> (b, d)
    layers: list[Parameters]  # of the trunk, input to output; the last one with the final norm
    head_parameters: Parameters  # none where a tower ends without a projection
    # Of a text tower: tokens (b, L) -> (b,), how many of them a row's features depend on; those behind may be cut off.
    # None: on all of them, or the tower is of a kind that is not known.
    lengths: Callable[[Tensor], Tensor] | None = None

    @property
    def trunk_parameters(self) -> Parameters:
        return [parameter for layer in self.layers for parameter in layer]


def image_parts(model: Any) -> TowerParts:
    visual, open_clip = model.visual, open_clip_module()
    if isinstance(visual, open_clip.timm_model.TimmModel):
        return TowerParts([visual], visual.trunk, visual.head, _timm_layers(visual.trunk), [*visual.head.parameters()])
    if isinstance(visual, open_clip.modified_resnet.ModifiedResNet):
        stages = [visual.layer1, visual.layer2, visual.layer3, visual.layer4]
        return _projected(visual, "attnpool.c_proj", stages, last=("attnpool.",))
    return _projected(visual, "proj", visual.transformer.resblocks, last=("ln_post.", "attn_pool"))


def text_parts(model: Any) -> TowerParts:
    text, open_clip = getattr(model, "text", None), open_clip_module()
    if text is None:
        return _open_clip_text(model)
    if isinstance(text, open_clip.hf_model.HFTextEncoder):
        return _hugging_face(text)
    if type(text) is open_clip.transformer.TextTransformer and _text_ends(text):
        return _open_clip_text(text)
    return _projected(text, "text_projection", text.transformer.resblocks, last=("ln_final.",))


def _projected(tower: Any, head_name: str, blocks: Iterable[nn.Module], *, last: tuple[str, ...]) -> TowerParts:
    """Of a tower that ends in `head_name`: a matrix (width, d), a linear layer, or nothing."""
    owner, _, field = head_name.rpartition(".")
    head = getattr(tower.get_submodule(owner), field)

    def trunk(inputs: Tensor) -> Tensor:
        """The tower with the identity in the place of its head: x I = x exactly."""
        features = functional_call(tower, _identity(head_name, head), (inputs,))
        return features[0] if isinstance(features, tuple) else features

    parameters = {name: p for name, p in tower.named_parameters() if not name.startswith(head_name)}
    return TowerParts([tower], trunk, _apply(head), _layers(parameters, blocks, last), _parameters(head))


def _open_clip_text(tower: Any) -> TowerParts:
    """Of open_clip's own text tower, or of `open_clip.CLIP`, which holds the modules of its text tower itself."""
    head, ends = tower.text_projection, _text_ends(tower)
    modules = [tower.token_embedding, tower.transformer, tower.ln_final]

    def trunk(tokens: Tensor) -> Tensor:
        dtype, length = tower.transformer.get_cast_dtype(), tokens.shape[1]
        x = tower.token_embedding(tokens).to(dtype) + tower.positional_embedding[:length].to(dtype)
        mask = tower.attn_mask
        x = tower.transformer(x, attn_mask=None if mask is None else mask[:length, :length])
        if ends:
            return tower.ln_final(x[torch.arange(len(x), device=x.device), ends(tokens)])
        pool = open_clip_module().transformer.text_global_pool
        return pool(tower.ln_final(x), tokens, _pool_type(tower), eos_token_id=_end_token(tower))

    names = ("token_embedding.", "positional_embedding", "transformer.", "ln_final.")
    parameters = {name: p for name, p in tower.named_parameters() if name.startswith(names)}
    layers = _layers(parameters, tower.transformer.resblocks, ("ln_final.",))
    lengths = None if ends is None else lambda tokens: ends(tokens) + 1
    return TowerParts(modules, trunk, _apply(head), layers, _parameters(head), lengths)


def _text_ends(tower: Any) -> Callable[[Tensor], Tensor] | None:  # tokens (b, L) -> (b,)
    """Where a causal tower takes the features of each text from: what stands behind changes nothing. None where it
    looks ahead, or takes them from elsewhere."""
    if tower.attn_mask is None or getattr(tower, "cls_emb", None) is not None:
        return None
    if _pool_type(tower) == "argmax":  # the end of a text has the highest number in CLIP's vocabulary
        return lambda tokens: tokens.argmax(dim=1)
    return (lambda tokens: tokens.eq(_end_token(tower)).int().argmax(dim=1)) if _pool_type(tower) == "eos" else None


def _pool_type(tower: Any) -> str:
    return tower.text_pool_type if hasattr(tower, "text_pool_type") else tower.pool_type


def _end_token(tower: Any) -> Any:
    return tower.text_eos_id if hasattr(tower, "text_eos_id") else getattr(tower, "eos_id", None)


def _hugging_face(text: Any) -> TowerParts:
    def is_text(tokens: Tensor) -> Tensor:
        return (tokens != text.config.pad_token_id).long()

    def trunk(tokens: Tensor) -> Tensor:
        mask = is_text(tokens)
        return text.pooler(text.transformer(input_ids=tokens, attention_mask=mask), mask)

    def lengths(tokens: Tensor) -> Tensor:  # up to the last token that is no padding, which the attention masks
        return (is_text(tokens) * torch.arange(1, tokens.shape[1] + 1, device=tokens.device)).amax(dim=1).clamp(min=1)

    # Encoders call their list of layers layer, layers, block or h: it is the longest list of modules.
    lists = [module for module in text.transformer.modules() if isinstance(module, nn.ModuleList)]
    blocks = max(lists, key=len, default=nn.ModuleList())
    layers = _layers(dict(text.transformer.named_parameters()), blocks, ("final",))
    return TowerParts([text], trunk, text.proj, layers, [*text.proj.parameters()], lengths)


def _timm_layers(trunk: Any) -> list[Parameters]:
    from timm.models import group_parameters

    if not hasattr(trunk, "group_matcher"):
        return [[*trunk.parameters()]]
    names = group_parameters(trunk, trunk.group_matcher())
    return [[trunk.get_parameter(name) for name in names[number]] for number in sorted(names)]


def _layers(
    parameters: dict[str, nn.Parameter], blocks: Iterable[nn.Module], last: tuple[str, ...]
) -> list[Parameters]:
    """open_clip's groups: embeddings, then each block; what starts with `last` comes with the last block."""
    of_blocks = [[*block.parameters()] for block in blocks]
    inside = {id(p) for block in of_blocks for p in block}
    outside = {name: p for name, p in parameters.items() if id(p) not in inside}
    after = [p for name, p in outside.items() if name.startswith(last)]
    layers = [[p for name, p in outside.items() if not name.startswith(last)], *of_blocks]
    layers[-1] = [*layers[-1], *after]
    return [layer for layer in layers if layer]


def _identity(name: str, head: Any) -> dict[str, Tensor]:
    if head is None:
        return {}
    if isinstance(head, nn.Linear):
        eye = torch.eye(head.in_features, dtype=head.weight.dtype, device=head.weight.device)
        return {f"{name}.weight": eye} | ({} if head.bias is None else {f"{name}.bias": eye.new_zeros(len(eye))})
    return {name: torch.eye(len(head), dtype=head.dtype, device=head.device)}


def _apply(head: Any) -> Callable[[Tensor], Tensor]:
    if isinstance(head, nn.Module):
        return head
    return nn.Identity() if head is None else lambda features: features @ head


def _parameters(head: Any) -> Parameters:
    return [head] if isinstance(head, nn.Parameter) else [] if head is None else [*head.parameters()]
