"""The parts of a tower: trunk and head, and the trunk's layers from input to output.

The head is the projection to the embedding. In a locked tower only the head trains, so that the trunk's features can be
computed once and stored.
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
Lengths = Callable[[Tensor], Tensor]


class Encoder(nn.Module):
    """One of a model's two encoders as a module: images (b, 3, H, W) or tokens (b, L) -> (b, d)."""

    def __init__(self, model: Any, side: str, *, normalize: bool = False):
        super().__init__()
        self.model, self.side, self.normalize = model, side, normalize

    def forward(self, inputs: Tensor) -> Tensor:
        return getattr(self.model, f"encode_{self.side}")(inputs, normalize=self.normalize)


@dataclass(frozen=True)
class TowerParts:
    """`head(trunk(inputs))` is the output of the tower before normalization."""

    modules: list[nn.Module]  # of the tower, perhaps without its head
    trunk: Callable[[Tensor], Tensor]  # images or tokens -> (b, width)
    head: Callable[[Tensor], Tensor]  # (b, width) -> (b, d)
    layers: list[Parameters]  # of the trunk, input to output; the last one with the final norm
    head_parameters: Parameters  # empty if the tower ends without a projection
    # For a text tower: tokens (b, L) -> (b,), the number of tokens that a row's features depend on. The trunk accepts
    # texts that are cut after them. None: the features depend on all tokens, or the kind of tower is unknown.
    lengths: Lengths | None = None

    @property
    def trunk_parameters(self) -> Parameters:
        return [parameter for layer in self.layers for parameter in layer]


def image_parts(model: Any) -> TowerParts:
    visual, open_clip = model.visual, open_clip_module()
    if isinstance(visual, open_clip.timm_model.TimmModel):
        return TowerParts([visual], visual.trunk, visual.head, _timm_layers(visual.trunk), [*visual.head.parameters()])
    if isinstance(visual, open_clip.modified_resnet.ModifiedResNet):
        stages = [visual.layer1, visual.layer2, visual.layer3, visual.layer4]
        return _projected(model, "image", "visual", "attnpool.c_proj", stages, last=("attnpool.",))
    return _projected(model, "image", "visual", "proj", visual.transformer.resblocks, last=("ln_post.", "attn_pool"))


def text_parts(model: Any) -> TowerParts:
    text = getattr(model, "text", None)
    if isinstance(text, open_clip_module().hf_model.HFTextEncoder):
        return _hugging_face(text)
    # open_clip.CLIP holds the modules of its text tower itself.
    tower, name = (model, "") if text is None else (text, "text")
    return _projected(model, "text", name, "text_projection", tower.transformer.resblocks, last=("ln_final.",))


def _projected(
    model: Any, side: str, tower_name: str, head_name: str, blocks: Iterable[nn.Module], *, last: tuple[str, ...]
) -> TowerParts:
    """The parts of a tower that ends in `head_name`: a matrix (width, d), a linear layer, or None."""
    tower = model.get_submodule(tower_name)
    owner, _, field = head_name.rpartition(".")
    head: Any = getattr(tower.get_submodule(owner), field)
    lengths = _causal_lengths(model, tower) if side == "text" else None
    prefix = f"model.{tower_name}.".replace("..", ".")  # in the names of the encoder below
    encoder = Encoder(model, side)

    def trunk(inputs: Tensor) -> Tensor:
        """Run the tower with the identity as its head, since x I = x exactly. Texts may be cut."""
        replaced = _identity(f"{prefix}{head_name}", head)  # made at each call: the model may have changed its device
        if lengths:
            length = inputs.shape[1]
            replaced[f"{prefix}positional_embedding"] = tower.positional_embedding[:length]
            replaced[f"{prefix}attn_mask"] = tower.attn_mask[:length, :length]
        return functional_call(encoder, replaced, (inputs,))

    not_in_trunk = (head_name, "visual.", "logit_")
    in_trunk = {name: p for name, p in tower.named_parameters() if not name.startswith(not_in_trunk)}
    modules = [tower] if tower_name else [tower.token_embedding, tower.transformer, tower.ln_final]
    apply = head if isinstance(head, nn.Module) else nn.Identity() if head is None else lambda features: features @ head
    parameters = [head] if isinstance(head, nn.Parameter) else [] if head is None else [*head.parameters()]
    return TowerParts(modules, trunk, apply, _layers(in_trunk, blocks, last), parameters, lengths)


def _causal_lengths(model: Any, tower: Any) -> Lengths | None:
    """The `lengths` of a causal tower, which takes a text's features from its end token: later tokens have no effect.
    None if the tower is not causal, or takes the features from elsewhere."""
    is_known = tower is model or type(tower) is open_clip_module().transformer.TextTransformer
    if not is_known or tower.attn_mask is None or getattr(tower, "cls_emb", None) is not None:
        return None
    kind = tower.text_pool_type if tower is model else tower.pool_type
    end: Any = tower.text_eos_id if hasattr(tower, "text_eos_id") else getattr(tower, "eos_id", None)
    if kind == "argmax":  # the end token has the highest number in CLIP's vocabulary
        return lambda tokens: tokens.argmax(dim=1) + 1
    return (lambda tokens: tokens.eq(end).int().argmax(dim=1) + 1) if kind == "eos" else None


def _hugging_face(text: Any) -> TowerParts:
    def is_text(tokens: Tensor) -> Tensor:
        return (tokens != text.config.pad_token_id).long()

    def trunk(tokens: Tensor) -> Tensor:
        mask = is_text(tokens)
        return text.pooler(text.transformer(input_ids=tokens, attention_mask=mask), mask)

    def lengths(tokens: Tensor) -> Tensor:  # up to the last token before the padding, which attention masks
        return (is_text(tokens) * torch.arange(1, tokens.shape[1] + 1, device=tokens.device)).amax(dim=1).clamp(min=1)

    # The layers are the longest list of modules: encoders call it layer, layers, block or h.
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


def _layers(trunk: dict[str, nn.Parameter], blocks: Iterable[nn.Module], last: tuple[str, ...]) -> list[Parameters]:
    """The trunk's parameters in open_clip's groups: embeddings, then each block. Names that start with one of `last` go
    with the last block."""
    of_blocks = [[*block.parameters()] for block in blocks]
    inside = {id(p) for block in of_blocks for p in block}
    outside = {name: p for name, p in trunk.items() if id(p) not in inside}
    layers = [[p for name, p in outside.items() if not name.startswith(last)], *of_blocks]
    layers[-1] = [*layers[-1], *(p for name, p in outside.items() if name.startswith(last))]
    return [layer for layer in layers if layer]


def _identity(name: str, head: Any) -> dict[str, Tensor]:
    """Parameters that make the head called `name` the identity."""
    if head is None:
        return {}
    if isinstance(head, nn.Linear):
        eye = torch.eye(head.in_features, dtype=head.weight.dtype, device=head.weight.device)
        return {f"{name}.weight": eye} | ({} if head.bias is None else {f"{name}.bias": eye.new_zeros(len(eye))})
    return {name: torch.eye(len(head), dtype=head.dtype, device=head.device)}
